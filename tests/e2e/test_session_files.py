"""Goal: a conversation in a file comes back, by `paged run --session` and by POST /slots, and neither a damaged file nor a
name from a client does any harm (D07, D09). Method: the program from outside on a tiny model; what is in the directory is
looked at after each refusal."""

import json
import os
import pathlib
import subprocess

import conftest
import models
import pytest
import serving

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.tiny(tmp_path_factory.mktemp("model"))
