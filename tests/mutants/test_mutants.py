"""Does the random tester of the cache (tests/sim/test_mem_random.c) notice faults? Each fault of faults.py is planted into a copy
of src/mem, which is compiled with the tester; within a minute the tester must fail. A sample by default, all with --long.
"""

import os
import pathlib
import random
import shutil
import subprocess

import pytest

from conftest import random_seed
from mutants.faults import FAULTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG = os.environ.get("PAGED_LONG") == "1"
SAMPLE = 4
SECONDS = 60
CFLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-w", "-pthread"]


def chosen():
    if LONG:
        return FAULTS
    return random.Random(random_seed()).sample(FAULTS, SAMPLE)


def build(folder, mem):
    """The tester over the sources of base and the given ones of mem."""
    sources = [*(ROOT / "src/base").glob("*.c"), *mem.glob("*.c"), ROOT / "tests/sim/test_mem_random.c"]
    program = folder / "tester"
    # The copy comes first, so that its headers are the ones that are found; `src` of the tree holds the rest.
    includes = [f"-I{mem.parent}", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}", f"-I{ROOT / 'tests'}"]
    subprocess.run([os.environ.get("CC", "cc"), *CFLAGS, *includes, *map(str, sources), "-o", str(program), "-lm"],
                   check=True)
    return program


@pytest.fixture(scope="module")
def copy_of_mem(tmp_path_factory):
    def copy():
        folder = tmp_path_factory.mktemp("mutant")
        shutil.copytree(ROOT / "src/mem", folder / "src/mem")
        return folder
    return copy


def test_every_fault_can_be_planted():
    for name, file, code, _ in FAULTS:
        assert (ROOT / "src/mem" / file).read_text(encoding="utf-8").count(code) == 1, f"{name}: {file} has changed"
    assert len({name for name, *_ in FAULTS}) == len(FAULTS) >= 20


def test_without_a_fault_nothing_is_found(copy_of_mem):
    folder = copy_of_mem()
    program = build(folder, folder / "src/mem")
    done = subprocess.run([program, "--seed", "1"], check=False, timeout=300, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("fault", chosen(), ids=lambda fault: fault[0].replace(" ", "_"))
def test_the_tester_notices(fault, copy_of_mem):
    _, file, code, instead = fault
    folder = copy_of_mem()
    path = folder / "src/mem" / file
    path.write_text(path.read_text(encoding="utf-8").replace(code, instead), encoding="utf-8")
    program = build(folder, folder / "src/mem")
    try:
        done = subprocess.run([program, "--long"], check=False, timeout=SECONDS, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not noticed in {SECONDS} s")
    assert done.returncode != 0, "the tester ended without noticing anything"
