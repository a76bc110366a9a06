"""Makes tests/diff/vectors/*.json: what llama.cpp thinks of the fixed text and how it goes on, for test_perplexity.py.

    python tests/diff/make_vectors.py NAME MODEL f32|f16

That is minutes of work for a quantised model, position by position, so it is done once and kept. Two settings of llama.cpp
are asked, an f32 cache and an f16 one with flash attention: how far they are from each other says what agreement can mean.
"""
import json
import pathlib
import sys

from oracle import LlamaCpp

HERE = pathlib.Path(__file__).resolve().parent
TEXT = HERE / "fixed_text.txt"
CTX = 512
SETTINGS = {"f32": {"kv_type": "f32", "flash_attn": False}, "f16": {"kv_type": "f16", "flash_attn": True}}
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,"]
N_GREEDY = 24


def pieces(tokens, bos):
    """Whole pieces of the text; the first token of each is BOS where the model has one."""
    cut = [tokens[i : i + CTX] for i in range(0, len(tokens) - CTX + 1, CTX)]
    return [[bos, *piece[1:]] for piece in cut] if tokens[0] == bos else cut


def main():
    name, model, setting = sys.argv[1:]
    path = HERE / "vectors" / f"{name}.json"
    made = json.loads(path.read_text()) if path.exists() else {"context": CTX, "logprobs": {}}
    with LlamaCpp(model, n_ctx=1024, **SETTINGS[setting]) as oracle:
        tokens = oracle.tokenize(TEXT.read_text(), add_special=True)
        made["tokens"] = pieces(tokens, 2)
        scores = made["logprobs"].setdefault(setting, [])
        if setting == "f32":
            made["greedy"] = {p: oracle.generate(oracle.tokenize(p, add_special=True), N_GREEDY) for p in PROMPTS}
        for piece in made["tokens"][len(scores) :]:  # what an earlier run has is kept
            scores.append([round(s[0], 4) for s in oracle.score(piece, CTX // 2 + 1)])
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
