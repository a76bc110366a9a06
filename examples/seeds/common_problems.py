# The document's "common problems" 1 and 2 and its appendix of parameters, with their lost `=` and `_` put back. Changed: the two
# imports, and smaller sizes for what the snippets leave open.
import time

import paged.seeds as torch
import paged as ops_transformer

# problem 1: not enough blocks
# symptom: seq_len is too long, 256 pages are not enough
paged_attn = ops_transformer.PagedAttention(num_heads=32, head_dim=64, max_blocks_per_head=256, page_size=16 * 1024)
block_table = torch.zeros(1, 32, 512, dtype=torch.int32)
kv_cache = torch.zeros(1, 32, 512 * 16 * 1024 // 2, dtype=torch.float16).npu()
q = k = v = torch.zeros(1, 32, 16385, 64, dtype=torch.float16).npu()
try:
    paged_attn(q, k, v, block_table, kv_cache, 16385)
except ops_transformer.NoBlocks as error:
    print(error)

# solution: a larger max_blocks_per_head
paged_attn = ops_transformer.PagedAttention(
    num_heads=32, head_dim=64,
    max_blocks_per_head=512,  # larger
    page_size=16 * 1024
)

# problem 2: the first call is slow
# symptom: the first call of PagedAttention is very slow (100ms)
# reason: the first one must take the data structures of the block table
# solution: warm up
warmup_q = torch.randn(1, 32, 128, 64).npu()
warmup_k = torch.randn(1, 32, 128, 64).npu()
warmup_v = torch.randn(1, 32, 128, 64).npu()
_ = paged_attn(warmup_q, warmup_k, warmup_v, block_table, kv_cache, 128)

# the real call
seq_len = 512
q, k, v = (torch.randn(1, 32, seq_len, 64, dtype=torch.float16).npu() for _ in range(3))
started = time.perf_counter()
output = paged_attn(q, k, v, block_table, kv_cache, seq_len)
print(f"{seq_len} tokens after the warm-up: {1000 * (time.perf_counter() - started):.1f} ms")

# the appendix: parameters, as recommended
paged_attn = ops_transformer.PagedAttention(
    page_size=16 * 1024,
    max_blocks_per_head=256,
    kv_cache_dtype=torch.float16
)
output = paged_attn(q, k, v, block_table, kv_cache, seq_len)
print(f"num_heads {paged_attn.num_heads} and head_dim {paged_attn.head_dim} are taken from the first call")
print(f"{paged_attn.used_blocks(block_table, kv_cache)} pages in use")

# FAQ 3: may the number of pages change? Yes, before each call: with a new block table, or with the tokens in it
block_table, kv_cache = paged_attn.resize(block_table, kv_cache, 300)
print(f"block table {block_table.shape}, {paged_attn.num_tokens(block_table, kv_cache)} tokens")
