"""Every public header compiles alone, as C11 and as C++11, with gcc and with clang: a header that needs another one included
before it, or that is no C++, is found here and not by a user."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = sorted(p.name for p in (ROOT / "include" / "paged").glob("*.h"))
COMPILERS = {
    "gcc": ["gcc", "-x", "c", "-std=c11", "-Wstrict-prototypes"],
    "clang": ["clang", "-x", "c", "-std=c11", "-Wstrict-prototypes"],
    "g++": ["g++", "-x", "c++", "-std=c++11"],
    "clang++": ["clang++", "-x", "c++", "-std=c++11"],
}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(header, compiler):
    # Twice, so that a missing include guard shows too.
    source = f'#include "paged/{header}"\n' * 2 + "extern int nothing;\n"
    command = [*COMPILERS[compiler], "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror",
               f"-I{ROOT / 'include'}", "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_headers():
    assert "base.h" in HEADERS and "engine.h" in HEADERS
