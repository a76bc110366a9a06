"""The scripts are POSIX shell and say clearly what is wrong; CMake refuses what the library cannot run on; C files are
formatted."""

import fcntl
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ["x", "tools/fresh-debian"]


def run(*command, **env):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
                          env=dict(os.environ, **env), stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_posix_shell(script):
    assert run("sh", "-n", script).returncode == 0
    done = run("shellcheck", "--shell=sh", script)
    assert done.returncode == 0, done.stdout


def test_files_are_formatted():
    done = run("./x", "fmt", "--check")
    assert done.returncode == 0, done.stderr


def test_help_names_every_command():
    done = run("./x", "help")
    assert done.returncode == 0 and done.stderr == ""
    for command in ("run", "test", "bench", "serve", "python", "build", "fmt", "docs", "setup", "clean"):
        assert f"./x {command}" in done.stdout


@pytest.mark.parametrize("arguments, code, words", [
    (["dance"], 2, "no command dance"),
    (["fmt", "--fast"], 2, "--check"),
    (["--ggml"], 2, "--ggml needs a folder"),
    (["bench", "nothing"], 2, "no bench nothing"),
    (["setup", "--ggml", "/no/such/folder"], 1, "/no/such/folder"),
    (["build", "fast"], 2, "release, asan, tsan"),
])
def test_mistakes_get_one_clear_line(arguments, code, words, tmp_path):
    """Also while another ./x builds, which has the lock for minutes."""
    with open(tmp_path / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run("./x", *arguments, PAGED_CACHE_DIR=str(tmp_path))
    assert done.returncode == code
    assert done.stdout == "" and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_cache_that_cannot_be_written():
    done = run("./x", "run", PAGED_CACHE_DIR="/proc/nothing")
    assert done.returncode == 1 and "PAGED_CACHE_DIR" in done.stderr


def test_missing_packages_without_apt_are_named(tmp_path):
    """On a system that is not Debian and lacks things, the one line names them."""
    for tool in ("sh", "dirname", "mkdir", "uname", "python3", "id", "flock"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = run("./x", "run", PATH=str(tmp_path), PAGED_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "not Debian" in done.stderr and "cmake" in done.stderr and "libpcre2-dev" in done.stderr


def test_missing_packages_without_root_are_named(tmp_path):
    for tool in ("sh", "dirname", "mkdir", "uname", "python3", "flock"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    for tool, text in (("apt-get", "exit 9"), ("id", "echo 1000")):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    done = run("./x", "run", PATH=str(tmp_path), PAGED_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "neither root nor sudo" in done.stderr and "apt-get install" in done.stderr and "gcc" in done.stderr


def test_cmake_refuses_other_systems(tmp_path):
    done = run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DCMAKE_SYSTEM_NAME=FreeBSD")
    assert done.returncode != 0
    said = " ".join(done.stderr.split())  # CMake breaks lines
    assert "Linux on a 64-bit little-endian processor only" in said and "FreeBSD" in said


def test_cmake_says_how_to_get_ggml(tmp_path):
    done = run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DCMAKE_DISABLE_FIND_PACKAGE_ggml=ON")
    said = " ".join(done.stderr.split())  # CMake breaks lines
    assert done.returncode != 0 and "-Dggml_DIR" in said and "./x build" in said
