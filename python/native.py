#!/usr/bin/env python3
"""Writes the C source of paged._native, the extension module, from the public headers; CMake calls it.

    native.py OUT.c COMPILER INCLUDE_DIR HEADER...      headers as in #include "paged/HEADER"

The declarations that Python sees are the headers themselves, as the preprocessor leaves them, so that there is no second list to
keep. cffi's generated code calls every function without the GIL and uses the limited API only, so that one module serves every
Python from 3.9 on.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import cffi


def declarations(compiler, include_dir, headers):
    """The headers without comments, macros and everything that the system's headers declare."""
    with tempfile.TemporaryDirectory() as folder:
        # cffi knows these types; the system's headers would bring a thousand others.
        for name in ("stdbool.h", "stddef.h", "stdint.h"):
            (pathlib.Path(folder) / name).touch()
        source = "".join(f'#include "paged/{name}"\n' for name in headers)
        command = [compiler, "-E", "-P", "-nostdinc", "-DPAGED_STATIC", f"-I{folder}", f"-I{include_dir}", "-xc", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def constants(text):
    """Values of enumerators are left to the compiler: cffi's parser knows no `1u << 0`."""
    return re.sub(r"(\b[A-Z][A-Z0-9_]+)\s*=\s*[^,}]*<<[^,}]*", r"\1 = ...", text)


def main():
    out, compiler, include_dir, *headers = sys.argv[1:]
    ffi = cffi.FFI()
    ffi.cdef(constants(declarations(compiler, include_dir, headers)))
    ffi.set_source("paged._native", "".join(f'#include "paged/{name}"\n' for name in headers))
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main()
