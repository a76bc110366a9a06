# The document's "Python call example", with its lost `=` and `_` put back. Changed: the two imports.
import paged.seeds as torch
import paged as ops_transformer
import numpy as np


def test_paged_attention():
    batch_size = 1
    num_heads = 32
    seq_len = 8192
    head_dim = 64

    # 1. the PagedAttention operator
    paged_attn = ops_transformer.PagedAttention(
        num_heads=num_heads,
        head_dim=head_dim,
        max_blocks_per_head=256,
        page_size=16 * 1024  # 16KB per page
    )

    # 2. the block table (on the host); shape: (batch, num_heads, max_blocks)
    block_table = torch.zeros(batch_size, num_heads, 256, dtype=torch.int32)

    # 3. the KV cache, allocated in advance: 256 pages of 16KB a head at most
    kv_cache = torch.zeros(
        batch_size, num_heads,
        256 * 16 * 1024 // 2,  # half = 2 bytes
        dtype=torch.float16
    ).npu()

    # 4. Q K V of this step
    q = torch.randn(batch_size, num_heads, seq_len, head_dim, dtype=torch.float16).npu()
    k = torch.randn(batch_size, num_heads, seq_len, head_dim, dtype=torch.float16).npu()
    v = torch.randn(batch_size, num_heads, seq_len, head_dim, dtype=torch.float16).npu()

    # 5. the call
    output = paged_attn(
        query=q, key=k, value=v,
        block_table=block_table.npu(),
        kv_cache=kv_cache,
        max_new_tokens=seq_len
    )

    print(f"Output shape: {output.shape}")
    print(f"Block table used: {block_table.sum().item()} blocks")
    return paged_attn, q, k, v, block_table, kv_cache, output  # added: for whoever looks closer


# the test
if __name__ == "__main__":  # added: so that it can be imported
    test_paged_attention()
