"""What is installed can be used by a stranger: the release build is installed into an empty prefix, and a small project finds
it there by find_package and by pkg-config, as shared and as static libraries."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PAGED_BUILD", ROOT / "build" / "release"))
CONSUMER = ROOT / "tests" / "api" / "consumer"
# Which public headers which library has.
CORE, ENGINE = ("base", "kv", "mem", "ops", "opencl", "arena", "plan"), ("model", "engine", "service", "conversation")
VERSION = re.search(r'VERSION_STRING "([0-9.]+)"', (ROOT / "include/paged/version.h").read_text())[1]


def run(*command, **env):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=300,
                          env=dict(os.environ, **env))
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def static_prefix(tmp_path_factory):
    """libpaged alone, static, built without ggml and PCRE2 in sight."""
    folder = tmp_path_factory.mktemp("static")
    run("cmake", "-S", ROOT, "-B", folder / "build", "-G", "Ninja", "-DPAGED_ENGINE=OFF", "-DBUILD_SHARED_LIBS=OFF",
        "-DPAGED_BUILD_TESTS=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_ggml=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_PkgConfig=ON")
    run("cmake", "--build", folder / "build")
    run("cmake", "--install", folder / "build", "--prefix", folder / "prefix")
    return folder / "prefix"


def pc_folder(prefix):
    return str(next(prefix.rglob("paged.pc")).parent)


def build_by_cmake(prefix, folder, *options):
    run("cmake", "-S", CONSUMER, "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", *options)
    run("cmake", "--build", folder)


def build_by_pkg_config(prefix, folder, name, module, *flags):
    found = run("pkg-config", "--cflags", "--libs", *flags, module, PKG_CONFIG_PATH=pc_folder(prefix)).split()
    program = folder / name
    run("gcc", "-std=c11", "-o", program, CONSUMER / f"{name}.c", *found, f"-Wl,-rpath,{prefix}/lib")
    return program


def test_cmake_finds_core_and_engine(prefix, tmp_path):
    build_by_cmake(prefix, tmp_path)
    assert run(tmp_path / "use_core").split() == [VERSION, VERSION]
    assert run(tmp_path / "use_engine").startswith("PAGED_ERR_IO: ")


def test_pkg_config_finds_core_and_engine(prefix, tmp_path):
    core = build_by_pkg_config(prefix, tmp_path, "use_core", "paged")
    assert run(core, LD_LIBRARY_PATH=str(prefix / "lib")).split() == [VERSION, VERSION]
    engine = build_by_pkg_config(prefix, tmp_path, "use_engine", "paged-engine")
    assert "model.gguf" in run(engine, LD_LIBRARY_PATH=str(prefix / "lib"))


def test_static_core_needs_nothing(static_prefix, tmp_path):
    build_by_cmake(static_prefix, tmp_path / "cmake", "-DWITH_ENGINE=OFF")
    assert run(tmp_path / "cmake" / "use_core").split() == [VERSION, VERSION]
    core = build_by_pkg_config(static_prefix, tmp_path, "use_core", "paged", "--static")
    assert run(core).split() == [VERSION, VERSION]
    assert not list(static_prefix.rglob("*engine*")), "the engine's files were installed without an engine"


def exported(library):
    """name -> version node, of the symbols that a shared library defines."""
    lines = run("nm", "-D", "--defined-only", library).splitlines()
    names = [line.split()[2] for line in lines if line.split()[1] != "A"]
    return dict((name.partition("@@")[::2]) for name in names)


def test_only_public_symbols_are_exported(prefix):
    core = exported(next(prefix.rglob("libpaged.so")))
    engine = exported(next(prefix.rglob("libpaged-engine.so")))
    minor = VERSION.rpartition(".")[0]
    for name, node in core.items():
        private = name.startswith("paged__")
        assert re.fullmatch(r"paged__?[a-z0-9_]+", name), name
        assert node == (f"PAGED_PRIVATE_{VERSION}" if private else f"PAGED_{minor}"), name
    assert "paged_version" in core and "paged_cache_create" in core and "paged_attn_plan" in core
    assert "paged_engine_create" in engine and "paged_model_load" in engine
    for name in engine:
        assert re.fullmatch(r"paged_[a-z0-9][a-z0-9_]*", name), name


def declared(*headers):
    """The functions that the public headers declare."""
    text = "".join((ROOT / "include/paged" / f"{name}.h").read_text() for name in headers)
    return set(re.findall(r"PAGED_API[^;]*?\b(paged_\w+)\(", text))


def test_every_declared_function_is_exported(prefix):
    core = exported(next(prefix.rglob("libpaged.so")))
    engine = exported(next(prefix.rglob("libpaged-engine.so")))
    assert declared(*CORE) - set(core) == set()
    assert declared(*ENGINE) - set(engine) == set()
    public = {name for name in core if not name.startswith("paged__")}
    assert public - declared(*CORE) == set()
    assert set(engine) - declared(*ENGINE) == set()


def test_soname_follows_the_version(prefix):
    minor = VERSION.rpartition(".")[0]
    for name in ("libpaged", "libpaged-engine"):
        dynamic = run("readelf", "-d", next(prefix.rglob(f"{name}.so")))
        assert f"soname: [{name}.so.{minor}]" in dynamic


def test_installed_program_runs_from_anywhere(prefix, tmp_path):
    moved = tmp_path / "moved"
    prefix_copy = run("cp", "-r", prefix, moved)
    assert prefix_copy == ""
    assert VERSION in run(moved / "bin" / "paged", "--version")


def test_libraries_carry_no_relative_run_path(prefix):
    for file in (prefix / "bin" / "paged", next(prefix.rglob("libpaged-engine.so"))):
        for entry in re.findall(r"R(?:UN)?PATH.*\[(.*)\]", run("readelf", "-d", file)):
            for folder in entry.split(":"):
                assert folder.startswith(("/", "$ORIGIN")), entry
