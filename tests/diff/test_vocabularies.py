"""Goal: the token ids of llama.cpp for every pre-split rule and kind of vocabulary. Method: both tokenize the nasty strings.

For the rules SmolLM2's vocabulary is put under another rule each time: where words end shows in the ids, whatever the
vocabulary is. SentencePiece vocabularies are made up.
"""
import json
import os
import pathlib
import re
import subprocess

import gguf
import pytest

from conftest import program
from models import spm_vocab, write_vocab
from nasty import NASTY
from texts import TEXTS

ALL = list(TEXTS.values()) + NASTY
FAMILIES = ["gpt-2", "llama-bpe", "qwen2", "falcon", "tekken"]
# The long tier takes all names that the source knows.
PRESPLIT = (pathlib.Path(__file__).resolve().parents[2] / "src" / "model" / "presplit.c").read_text()
EVERY = [name for names in re.findall(r'^ {4}\{"( [^"]+ )",', PRESPLIT, re.M) for name in names.split()]
MARKED = ["<|user|>\nHello<|end|>\n<|assistant|>", "<|user|>  x", "<s> Hello", "<s>\n\nx", "a<|end|> \t\n b", "<|place|>  x",
          "</s>  x", "<|endoftext|>  x", "<unk>  x", " <|end|> <|end|> ", "<|end|>", "<|user|>\u00a0x"]
PLAIN = ["Hello", " Hello", "  x", "", "\n", "a\tb", "é", "Hello world", "the  and   ing"]


def ours(model, texts, *flags):
    records = b"".join(b"%d\n%b" % (len(text.encode()), text.encode()) for text in texts)
    done = subprocess.run([program("tool_tokens"), model, *flags], input=records, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(oracle, path, texts, *flags):
    """Ids with and without control tokens; and the same bytes back. In SentencePiece U+2581 is a space."""
    for control in (True, False):
        answers = ours(path, texts, *(["--control"] if control else []))
        wrong = [(text[:60], a["tokens"][:20], theirs[:20]) for text, a in zip(texts, answers, strict=True)
                 if a["tokens"] != (theirs := oracle.tokenize(text, parse_special=control))]
        assert not wrong, f"{len(wrong)} of {len(texts)} texts differ, first: {wrong[:3]}"
        if not control:
            back = [bytes.fromhex(a["back"]).decode() for a in answers]
            assert [b for b, t in zip(back, texts) if "\u2581" not in t] == [t for t in texts if "\u2581" not in t]


@pytest.fixture(scope="module")
def smollm2_vocab(model):
    reader = gguf.GGUFReader(model)
    get = lambda key: reader.get_field(f"tokenizer.ggml.{key}").contents()  # noqa: E731
    return {"model": "gpt2", "tokens": get("tokens"), "types": get("token_type"), "merges": get("merges"),
            "ids": {"bos_token_id": 1, "eos_token_id": 2}, "flags": {"add_bos_token": False}}


@pytest.mark.parametrize("rule", EVERY if os.environ.get("PAGED_LONG") else FAMILIES)
def test_rule(oracle_of, smollm2_vocab, tmp_path, rule):
    path = str(tmp_path / "rule.gguf")
    write_vocab(path, pre=rule, **smollm2_vocab)
    check(oracle_of(path), path, ALL)


@pytest.mark.parametrize("prefix", [True, False], ids=["dummy-prefix", "no-prefix"])
@pytest.mark.parametrize("name", ["tiny", "Phi-3 tiny"])
def test_spm(oracle_of, tmp_path, name, prefix):
    """In Phi-3, white space behind a marker is no text."""
    path = str(tmp_path / "spm.gguf")
    tokens, types, scores, ids = spm_vocab()
    write_vocab(path, name=name, model="llama", tokens=tokens, types=types, scores=scores, ids=ids,
                flags={"add_space_prefix": prefix})
    oracle = oracle_of(path)
    check(oracle, path, ALL + PLAIN)
    answers = ours(path, MARKED, "--control")
    assert [a["tokens"] for a in answers] == [oracle.tokenize(text) for text in MARKED]


@pytest.fixture
def oracle_of():
    pytest.importorskip("xllamacpp", reason="the oracle xllamacpp is not installed")
    from oracle import LlamaCpp

    servers = []

    def get(path):
        servers.append(LlamaCpp(path, n_ctx=64))
        return servers[-1]

    yield get
    for server in servers:
        server.close()
