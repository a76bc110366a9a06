"""Real torch tensors, where torch is installed (5 GB, so it is nobody's requirement): views share memory, the documents'
interface takes them as they are and gives them back, in the types that NumPy does not have, too."""

import pytest

import paged

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_share_memory(dtype):
    x = torch.arange(24).to(dtype).reshape(2, 3, 4)[:, ::2]
    got = paged.arrays.view(x)
    assert got.__array_interface__["data"][0] == x.data_ptr() and got.shape == (2, 2, 4)
    got[0, 0, 0] = 7
    assert x[0, 0, 0] == 7


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 3e-2)])
def test_the_documents_interface(dtype, bound):
    op = paged.PagedAttention(num_heads=4, head_dim=64, kv_cache_dtype=dtype)
    table, cache = torch.zeros(1, 4, 16, dtype=torch.int32), torch.zeros(1, 4, 16 * 16 * 1024 // dtype.itemsize, dtype=dtype)
    q, k, v = (torch.randn(1, 4, 201, 64, dtype=dtype) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(q.double(), k.double(), v.double(), is_causal=True)
    out = op(q[:, :, :200], k[:, :, :200], v[:, :, :200], table, cache, max_new_tokens=200)
    assert out.dtype == dtype and (out.double() - expected[:, :, :200]).abs().max() < bound
    # Views of the same memory are the same cache.
    out = op(q[:, :, 200:], k[:, :, 200:], v[:, :, 200:], table[:], cache.view(cache.shape))
    assert (out.double() - expected[:, :, 200:]).abs().max() < bound
    assert op.num_tokens(table, cache) == 201 and table[0, 0, :4].tolist() == [0, 1, 2, 3]
