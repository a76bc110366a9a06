# The document's standard attention, with its lost `=` and `_` put back: a cache that is reserved for the longest sequence.
# Changed: the import. What it says in its comments is not right: the cache has head_dim elements for each of these, so that at
# head_dim 64 it is 64 MiB a layer.
import paged.seeds as torch
from paged.seeds import nn


# standard attention: contiguous memory
class StandardAttention(nn.Module):
    def __init__(self, config):
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_heads
        self.head_dim = self.hidden_size // self.num_heads

    def forward(self, hidden_states, past_key_values=None):
        # the problem is here: a contiguous KV cache for a new sequence
        max_seq_len = 8192
        batch_size = 1

        # contiguous: fixed once max_seq_len is fixed
        # 8192 * 32 * 2 * 2 bytes = 1MB per layer
        # 32 layers: 32MB of contiguous memory
        kv_cache = torch.zeros(
            batch_size, 2, self.num_heads, max_seq_len, self.head_dim,
            device=hidden_states.device, dtype=hidden_states.dtype
        )
        return kv_cache


if __name__ == "__main__":  # added: what it gives, and the same cache in use
    import types

    import paged

    layer = StandardAttention(types.SimpleNamespace(hidden_size=32 * 64, num_heads=32))
    kv_cache = layer(torch.zeros(1, 10, 32 * 64, dtype=torch.float16))
    print(f"a cache of {kv_cache.nbytes / 2**20:.0f} MiB a layer, {32 * kv_cache.nbytes / 2**30:.0f} GiB for 32 layers")

    attention = paged.StandardAttention(num_heads=32, head_dim=64, max_seq_len=8192)
    q, k, v = (torch.randn(1, 32, 10, 64, dtype=torch.float16) for _ in range(3))
    output = attention(q, k, v, kv_cache)
    print(f"{attention.num_tokens(kv_cache)} tokens in it; output {output.shape}")
