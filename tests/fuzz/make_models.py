"""Makes the seeds of fuzz_model: a model of each family, as small as it can be. Run: make_models.py FOLDER"""
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "diff"))
import gguf  # noqa: E402
import models  # noqa: E402


def spm(writer, name):
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xFF>", "\u2581", "a", "t", "h", "e", "th", "\u2581the", "<|end|>"]
    types = [2, 3, 3, 6, 6] + [1] * 7 + [3]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_add_space_prefix(True)
    return len(tokens)


def bpe(writer, name):
    tokens = ["a", "t", "h", "e", "\u0120", "th", "\u0120th", "the", "1", "\u010a", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"falcon-7b": "falcon", "gpt2": "gpt-2", "qwen2": "qwen2"}.get(name, "llama-bpe"))
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 10 + [3])
    writer.add_token_merges(["t h", "\u0120 th", "th e"])
    writer.add_eos_token_id(10)
    return len(tokens)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for shape in models.SHAPES + models.WINDOWED:
        if shape.arch == "llama" and shape.name not in ("yarn", "biases", "mistral-window"):
            continue
        small = dataclasses.replace(
            shape, n_layers=min(shape.n_layers, 2), n_embd=8, n_ff=8, n_heads=2, n_ctx=64, window=min(shape.window, 6),
            n_kv_heads=1 if shape.n_kv_heads < shape.n_heads else 2, head_dim=4, n_rot=0, global_every=2 if shape.global_every
            else 0, n_ctx_orig=min(shape.n_ctx_orig, 32))
        writer = gguf.GGUFWriter(folder / f"{shape.name}.gguf", shape.arch)
        models._add_numbers(writer, small)
        writer.add_name(shape.name)
        if small.global_every and shape.arch == "gemma3":
            writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        n_vocab = (spm if shape.arch in ("gemma3", "phi3", "gemma2") else bpe)(writer, shape.name)
        for name, data in models.random_weights(small, 1).items():
            if name in ("token_embd.weight", "output.weight"):
                data = data[:n_vocab].copy()
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    main()
