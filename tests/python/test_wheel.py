"""A stranger's `pip install .`: the wheel is built in isolation and imported in an empty environment, where the operator
computes; with ggml at hand it has the engine. Minutes, so only with --long; what costs nothing is asked of every build."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build" / "release"))
VERSION = re.search(r'VERSION_STRING "([0-9.]+)"', (ROOT / "include/paged/version.h").read_text())[1]
LONG = pytest.mark.skipif(not os.environ.get("PAGED_LONG"), reason="minutes: --long")

TRY = """
import numpy as np, paged
cache = paged.Cache(1, 1, 64, max_blocks=4)
seq = cache.sequence()
seq.reserve(2)
ones = np.ones((2, 1, 64), np.float32)
cache.kv().write(ones, ones, seq.slots())
attention = paged.Attention(1, 1, 64, max_q=2)
attention.plan(cache.kv(), cache.tables([seq]), [0, 2])
assert np.allclose(attention.run(ones), 1)
print(paged.__version__, hasattr(paged, "LLM"))
"""


def run(*command, **env):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CMAKE_PREFIX_PATH")}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=900,
                          env={**clean, **env})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_version_is_that_of_the_library():
    import paged

    assert paged.__version__ == VERSION


def test_the_module_serves_every_python():
    """Of Python's symbols only those of the limited API are used, and none of ours is exported."""
    module = BUILD / "python" / "paged" / "_native.abi3.so"
    assert re.findall(r" T (\w+)", run("nm", "-D", "--defined-only", module)) == ["PyInit__native"]
    used = set(re.findall(r" U (_?Py\w+)", run("nm", "-D", "--undefined-only", module)))
    assert used and not {name for name in used if name.startswith("_Py") and name not in ("_Py_Dealloc", "_Py_NoneStruct")}, used


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A Python with nothing in it."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


@LONG
@pytest.mark.parametrize("ggml", [False, True])
def test_wheel_in_a_clean_environment(empty, tmp_path, ggml):
    define = f"ggml_DIR={os.environ['PAGED_GGML_DIR']}" if ggml else "CMAKE_DISABLE_FIND_PACKAGE_ggml=ON"
    run(empty, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, f"--config-settings=cmake.define.{define}", ROOT)
    wheel, = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"paged-{VERSION}-cp39-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"paged/__init__.py", "paged/py.typed", "paged/_native.abi3.so"} <= names
    assert all(name.startswith(("paged/", f"paged-{VERSION}.dist-info/")) for name in names), names
    run(empty, "-m", "pip", "install", "--force-reinstall", wheel)
    assert run(empty, "-c", TRY).split() == [VERSION, str(ggml)]
