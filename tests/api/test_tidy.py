"""The tree keeps its laws (tools/tidy), and tools/tidy finds what breaks them: each violation is planted into a small tree."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = "/* x.c: a file of a small tree that only this test reads. */\n"


def tidy(root):
    done = subprocess.run([sys.executable, ROOT / "tools" / "tidy", root], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def plant(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_tree_is_tidy():
    code, output = tidy(ROOT)
    assert code == 0, output


def test_a_clean_tree_passes(tmp_path):
    plant(tmp_path, "src/mem/x.c", HEAD + '#include "mem/mem.h"\n#include "base/base.h"\n#include "paged/mem.h"\n'
          '#include "paged/kv.h"\n/* printf("x") and malloc(1) in a comment */\nconst char *x = "free(y)";\n')
    plant(tmp_path, "src/engine/x.c", HEAD + '#include "paged/mem.h"\n#include "model/model.h"\n#include <stdio.h>\n')
    plant(tmp_path, "src/model/x.c", HEAD + '#include "paged/ops.h"\n#include "ops/ops.h"\n')
    plant(tmp_path, "src/cli/x.c", HEAD + '#include "server/x.h"\nint f(void) { return printf("x"); }\n')
    plant(tmp_path, "src/base/alloc.c", HEAD + "void f(void *p) { free(p); }\n")
    plant(tmp_path, "tests/unit/test_x.c", HEAD + '#include "mem/mem.h"\n#include "ops/ops.h"\n')
    assert tidy(tmp_path) == (0, "")


@pytest.mark.parametrize("room, header", [
    ("base", "mem/mem.h"), ("base", "paged/ops.h"), ("ops", "paged/plan.h"), ("mem", "ops/ops.h"),
    ("mem", "paged/ops.h"), ("ops", "mem/mem.h"),
    ("ops", "paged/mem.h"), ("model", "mem/mem.h"), ("model", "paged/mem.h"), ("model", "engine/engine.h"),
    ("model", "paged/engine.h"), ("engine", "store/store.h"), ("store", "server/x.h"), ("server", "cli/cli.h"),
    ("mem", "../ops/ops.h"), ("engine", "paged/paged.h"), ("attic", "base/base.h"),
])
def test_the_import_law(tmp_path, room, header):
    plant(tmp_path, f"src/{room}/x.c", HEAD + f'#include "{header}"\n')
    code, output = tidy(tmp_path)
    assert code == 1 and output.startswith(f"src/{room}/x.c:{1 if room == 'attic' else 2}: "), output


@pytest.mark.parametrize("path, text, line, word", [
    ("src/mem/x.c", HEAD + "/* " + "y" * 120 + " */\n", 2, "columns"),
    ("src/mem/x.c", HEAD + "\tint x;\n", 2, "tab"),
    ("src/mem/x.c", HEAD + "int x; \n", 2, "blanks"),
    ("src/mem/x.c", HEAD + "/* TO" + "DO: later */\n", 2, "unfinished"),
    ("src/mem/x.c", "int x;\n", 1, "head comment"),
    ("src/mem/x.c", HEAD + "int x;\n" * 1000, 1000, "1001 lines"),
    ("src/mem/x.c", HEAD + "void f(void *p) {\n    free(p);\n}\n", 3, "free()"),
    ("src/ops/x.c", HEAD + 'void f(void) { printf("x"); }\n', 2, "printf()"),
    ("src/model/x.c", HEAD + "void f(void) { abort(); }\n", 2, "abort()"),
    ("src/base/alloc.c", HEAD + "void f(void) { exit(1); }\n", 2, "exit()"),
    ("include/paged/x.h", "#define X 1\n", 1, "head comment"),
    ("tests/unit/test_x.c", HEAD + "int x;\t\n", 2, "tab"),
])
def test_the_look(tmp_path, path, text, line, word):
    plant(tmp_path, path, text)
    code, output = tidy(tmp_path)
    assert code == 1 and any(v.startswith(f"{path}:{line}: ") and word in v for v in output.splitlines()), output


def test_an_empty_tree_is_no_success(tmp_path):
    assert tidy(tmp_path)[0] == 1
