"""Runs llama.cpp's server (package xllamacpp) in a process of its own, for oracle.py.

    python llamacpp_server.py '{"model": "FILE", "n_ctx": 2048, "n_threads": 1, "kv_type": "f32",
                                "flash_attn": false}'

Prints the address as one line of JSON and ends when its standard input is closed, so that it cannot outlive
its owner.
"""
import json
import os
import sys

import xllamacpp


def main():
    config = json.loads(sys.argv[1])
    # llama.cpp prints on file descriptor 1 as well; the address must be the only thing there.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    params = xllamacpp.CommonParams()
    params.model.path = config["model"]
    params.port = 0
    params.n_ctx = config["n_ctx"]
    params.n_parallel = config.get("n_parallel", 1)
    params.swa_full = True  # else each request of a model with windows is computed from its first token
    params.cpuparams.n_threads = config["n_threads"]
    params.cpuparams_batch.n_threads = config["n_threads"]
    kv_types, flash = xllamacpp.ggml_type, xllamacpp.llama_flash_attn_type
    kv_type = {"f16": kv_types.GGML_TYPE_F16, "f32": kv_types.GGML_TYPE_F32, "q8_0": kv_types.GGML_TYPE_Q8_0}[
        config["kv_type"]
    ]
    params.cache_type_k = params.cache_type_v = kv_type
    params.flash_attn_type = (
        flash.LLAMA_FLASH_ATTN_TYPE_ENABLED if config["flash_attn"] else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address}), file=answer, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
