"""The interface of the documents: `PagedAttention` over a key-value cache that the caller owns, with a block table for each batch
entry and head, and `StandardAttention` over a contiguous one, the baseline to compare with.

    cache   page `id` of a batch entry and head begins at byte id * page_size of its part; its first half holds keys, its second
            values, [tokens, head_dim] each: 64 tokens in 16 KB at head_dim 64 in f16
    table   int32 (batch, kv_heads, max_blocks), filled here, in place: ids 0 … max_blocks - 1, local to batch entry and head;
            what is not used stays 0

Since 0 is an id like any other, a table does not say how much of it is used; that is *state*, kept for each (block_table,
kv_cache). More than one query begins anew, one query appends; append=True and reset() say it openly. Queries sit at the end of
the keys (causal, bottom-right). Whatever their sample code would have overwritten is an error, with the numbers, and nothing has
changed then.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from . import arrays
from ._native import ffi, lib
from .arrays import ArrayLike, DType, integers, pointer, shaped, type_name, view, writable
from .errors import InvalidArgument, NoBlocks, TooLong
from .ops import KV, Attention, Tables

__all__ = ["BlockTable", "PagedAttention", "StandardAttention"]

PAGE_SIZE = 16 * 1024
ROWS = 512  # query rows that are computed at once: as large as a prompt's chunk, so that what is converted stays in the cache
BLOCK_SIZE_MAX = 1024


class BlockTable:
    """The pages of one head, as the documents' struct: num_blocks, block_ids, and block_offsets, the bytes where they begin."""

    __slots__ = ("block_ids", "page_size")

    def __init__(self, block_ids: ArrayLike, page_size: int = PAGE_SIZE) -> None:
        self.block_ids = integers(block_ids, "block_ids", np.int32)
        if self.block_ids.size and self.block_ids.min() < 0:
            raise InvalidArgument(f"block {self.block_ids.min()} is negative")
        self.page_size = int(page_size)

    @property
    def num_blocks(self) -> int:
        """How many pages there are (not the sum of their ids)."""
        return len(self.block_ids)

    @property
    def block_offsets(self) -> np.ndarray:
        """[num_blocks] int64, bytes: block id times page size."""
        return self.block_ids.astype(np.int64) * self.page_size

    def __len__(self) -> int:
        return self.num_blocks

    def __repr__(self):
        return f"BlockTable({self.block_ids.tolist()}, page_size={self.page_size})"


class _State:
    """What is in a cache: tokens of each batch entry. `owners` are weak: when the memory of a key is gone, so is its state."""

    __slots__ = ("n_tokens", "owners", "shape")

    def __init__(self, shape):
        self.n_tokens, self.owners, self.shape = 0, (), shape


def _owner(x):
    """The object whose memory it is."""
    while isinstance(x, np.ndarray) and isinstance(x.base, np.ndarray):
        x = x.base
    return getattr(x, "_base", None) if not isinstance(x, np.ndarray) and getattr(x, "_base", None) is not None else x


class _Operator:
    """What both have in common: the state of caches, the attention objects, and the order of a call."""

    def __init__(self, num_heads, head_dim, kv_cache_dtype, causal, threads):
        self.num_heads = None if num_heads is None else self._positive(num_heads, "num_heads")
        self.head_dim = None if head_dim is None else self._positive(head_dim, "head_dim")
        self.kv_cache_dtype = type_name(kv_cache_dtype)
        if self.kv_cache_dtype == "i8":
            raise InvalidArgument("kv_cache_dtype int8 needs scales, for which this interface has no place; see KV")
        self.causal = bool(causal)
        self.threads = arrays.cpu_count() if threads is None else self._positive(threads, "threads")
        self._attentions = {}
        self._states = {}
        self._lock = threading.RLock()

    @staticmethod
    def _positive(value, name):
        number = int(value)
        if number < 1:
            raise InvalidArgument(f"{name} is {number}")
        return number

    @property
    def _item(self):
        return arrays.TYPES[self.kv_cache_dtype][1].itemsize

    # ---- state ----

    def _state(self, create, *parts):
        """The state of these arrays; a new, empty one where there is none."""
        views = [view(x, "the cache") for x in parts]
        key = tuple(array.__array_interface__["data"][0] for array in views)
        shape = tuple(array.shape for array in views)
        state = self._states.get(key)
        if state is None or state.shape != shape:
            state = _State(shape)
            if create:
                self._states[key] = state
                state.owners = tuple(self._watch(_owner(x), key) for x in parts)
        return state

    def _watch(self, owner, key):
        states = self._states
        try:
            # Another array may get the same address later, and must not find this one's state. The callback runs in any thread,
            # so it does what one bytecode does.
            return weakref.ref(owner, lambda _, pop=states.pop: pop(key, None))
        except TypeError:
            return owner

    # ---- a call ----

    def _inputs(self, query, key, value, max_new_tokens):
        q, k, v = (view(x, name) for name, x in (("query", query), ("key", key), ("value", value)))
        for name, x in (("query", q), ("key", k), ("value", v)):
            if x.ndim != 4 or 0 in x.shape:
                raise InvalidArgument(f"{name} has shape {x.shape}, not (batch, heads, tokens, head_dim)")
            arrays.floating(x, name)
        batch, heads, n_new, dim = q.shape
        if k.shape != v.shape or k.shape[0] != batch or k.shape[2:] != (n_new, dim) or heads % k.shape[1]:
            raise InvalidArgument(f"query is {q.shape}, key {k.shape}, value {v.shape}; key and value have the query's batch, "
                                  "tokens and head_dim, and a number of heads that divides its heads")
        for name, have in (("num_heads", heads), ("head_dim", dim)):
            if getattr(self, name) not in (None, have):
                raise InvalidArgument(f"the query has {name} {have}, this operator {getattr(self, name)}")
        if max_new_tokens is not None and n_new > int(max_new_tokens):
            raise InvalidArgument(f"there are {n_new} new tokens, max_new_tokens is {int(max_new_tokens)}")
        return q, k, v

    def _take_shape(self, q):
        """From the first call on these are fixed."""
        self.num_heads, self.head_dim = q.shape[1], q.shape[3]

    def _attention(self, n_kv_heads, block_size, n_rows, n_seqs, n_keys):
        """An Attention that is large enough. Sizes are powers of two, so that a growing sequence seldom needs a new one."""
        key = (n_kv_heads, block_size, self.causal)
        need = (n_rows, n_seqs, n_keys)
        found = self._attentions.get(key)
        if found is None or any(a < b for a, b in zip(found[0], need)):
            have = tuple(max(1 << (n - 1).bit_length(), old) for n, old in zip(need, found[0] if found else (1, 1, 4096)))
            found = have, Attention(self.num_heads, n_kv_heads, self.head_dim, block_size=block_size, dtype=self.kv_cache_dtype,
                                    layout="plain", causal=self.causal, max_q=have[0], max_seqs=have[1], max_k=have[2],
                                    threads=self.threads)
            self._attentions[key] = found
        return found[1]

    def _compute(self, q, kv, blocks, n_past):
        """Attention of all queries (batch, heads, tokens, head_dim) over keys that are written, some rows of each entry at a
        time."""
        batch, heads, n_new, dim = q.shape
        step = min(n_new, max(1, ROWS // batch))
        attention = self._attention(kv.n_kv_heads, kv.block_size, step * batch, batch, n_past + n_new)
        out = np.empty(q.shape, q.dtype)
        for begin in range(0, n_new, step):
            end = min(begin + step, n_new)
            n_keys = n_past + (end if self.causal else n_new)
            attention.plan(kv, Tables(blocks, np.full(batch, n_keys, np.int32)),
                           np.arange(batch + 1, dtype=np.int32) * (end - begin))
            rows = np.empty((batch, end - begin, heads, dim), np.float32)
            arrays.to_f32(q[:, :, begin:end].transpose(0, 2, 1, 3), "query", rows)
            result = attention.run(rows.reshape(-1, heads, dim))
            arrays.from_f32(result.reshape(rows.shape).transpose(0, 2, 1, 3), out[:, :, begin:end])
        return out

    def _write(self, kv, k, v, slots):
        """Keys and values (batch, heads, tokens, head_dim) into slots [batch, heads, tokens] of a pool that all heads share."""
        threads = self.threads if k.shape[2] >= ROWS else 1
        for b in range(k.shape[0]):
            kv.write(k[b].reshape(-1, 1, k.shape[3]), v[b].reshape(-1, 1, v.shape[3]), slots[b].reshape(-1), threads)

    def warmup(self, batch: int = 1, n_kv_heads: int | None = None, n_keys: int = 4096) -> None:
        """Takes now what the first call would take: attention objects and threads. num_heads and head_dim must be known."""
        if None in (self.num_heads, self.head_dim):
            raise InvalidArgument("num_heads and head_dim are not known before the first call; give them")
        with self._lock:
            self._warmup(int(batch), self.num_heads if n_kv_heads is None else int(n_kv_heads), int(n_keys))


class PagedAttention(_Operator):
    """Attention over a paged cache, as the documents call it.

    num_heads, head_dim    of the query; None: taken from the first call
    max_blocks_per_head    pages that a head may use; may be changed between calls
    page_size              bytes of a page, keys and values together
    kv_cache_dtype         float16, float32 or bfloat16 (words, NumPy's types or torch's)
    causal                 False: every query sees all keys
    gather                 True: copies the pages of each sequence together first and computes on the copy (their way); same bits
    threads                None: as many as this process has CPUs

        output = paged_attn(query, key, value, block_table, kv_cache, max_new_tokens)

    query (batch, heads, tokens, head_dim), key and value (batch, kv_heads, tokens, head_dim), heads a multiple of kv_heads, of
    any floating type; block_table int32 (batch, kv_heads, max_blocks), kv_cache of kv_cache_dtype (batch, kv_heads, max_blocks *
    page_size bytes), both written in place. The output has the query's shape and type.

    Errors: InvalidArgument; NoBlocks with the pages needed and allowed. Nothing has changed then.
    """

    def __init__(self, num_heads: int | None = None, head_dim: int | None = None, max_blocks_per_head: int = 256,
                 page_size: int = PAGE_SIZE, kv_cache_dtype: DType = "float16", *, causal: bool = True, gather: bool = False,
                 threads: int | None = None) -> None:
        super().__init__(num_heads, head_dim, kv_cache_dtype, causal, threads)
        self.max_blocks_per_head = self._positive(max_blocks_per_head, "max_blocks_per_head")
        self.page_size = self._positive(page_size, "page_size")
        self.gather = bool(gather)
        if self.page_size % (2 * self._item):
            raise InvalidArgument(f"page_size {self.page_size} has no two halves of whole {self.kv_cache_dtype} elements")
        if self.head_dim is not None:
            self.block_size(self.head_dim)

    def block_size(self, head_dim: int | None = None) -> int:
        """Tokens of a page."""
        dim = self.head_dim if head_dim is None else head_dim
        if dim is None:
            raise InvalidArgument("head_dim is not known before the first call")
        n = self.page_size // (2 * self._item * dim)
        if not 1 <= n <= BLOCK_SIZE_MAX:
            raise InvalidArgument(f"a page of {self.page_size} bytes holds {n} tokens of head_dim {dim} in "
                                  f"{self.kv_cache_dtype}, not 1 … {BLOCK_SIZE_MAX}")
        return n

    def __call__(self, query: ArrayLike, key: ArrayLike, value: ArrayLike, block_table: ArrayLike, kv_cache: ArrayLike,
                 max_new_tokens: int | None = None, *, append: bool | None = None) -> Any:
        with self._lock:
            q, k, v = self._inputs(query, key, value, max_new_tokens)
            block_size = self.block_size(q.shape[3])
            table = self._table(block_table, k.shape)
            pool = self._pool(kv_cache, table, q.shape[3], block_size)
            append = q.shape[2] == 1 if append is None else append
            state = self._state(False, block_table, kv_cache)
            n_past = state.n_tokens if append else 0
            n_tokens = n_past + q.shape[2]
            ids = self._take_pages(table, n_past, n_tokens, block_size)
            self._take_shape(q)

            # From here on nothing fails but for want of memory.
            blocks = ids + np.arange(table[:, :, 0].size, dtype=np.int32).reshape(*table.shape[:2], 1) * table.shape[2]
            positions = np.arange(n_past, n_tokens)
            slots = blocks[:, :, positions // block_size].astype(np.int64) * block_size + positions % block_size
            self._write(pool, k, v, slots)
            out = self._run(q, pool, blocks, n_past)
            table[:, :, :ids.shape[2]] = ids
            table[:, :, ids.shape[2]:] = 0
            self._state(True, block_table, kv_cache).n_tokens = n_tokens
            return arrays.like(out, query)

    def _table(self, block_table, k_shape):
        words = "(batch, kv_heads, max_blocks)"
        table = writable(shaped(block_table, "block_table", (*k_shape[:2], None), words), "block_table")
        if table.dtype != np.int32 or table.shape[2] == 0:
            raise InvalidArgument(f"block_table is {table.shape} of {table.dtype}, not int32 {words}")
        return table

    def _pool(self, kv_cache, table, dim, block_size):
        """All pages of the cache as the blocks of one pool."""
        n = table.shape[2] * self.page_size // self._item
        words = f"(batch, kv_heads, {table.shape[2]} pages of {self.page_size} bytes)"
        cache = writable(shaped(kv_cache, "kv_cache", (*table.shape[:2], n), words), "kv_cache")
        if cache.dtype.kind in "iu" and cache.dtype.itemsize == 2 and self.kv_cache_dtype == "bf16":
            cache = cache.view(np.uint16)
        if not cache.flags.c_contiguous or arrays.floating(cache, "kv_cache") != self.kv_cache_dtype:
            raise InvalidArgument(f"kv_cache is {cache.dtype} with strides {cache.strides}, not dense {self.kv_cache_dtype}")
        n_blocks = table.size
        if n_blocks >= 2**31:
            raise InvalidArgument(f"{n_blocks} pages, more than 2^31 - 1")
        native = ffi.new("paged_kv *", {
            "k": pointer("uint8_t *", cache), "v": pointer("uint8_t *", cache) + self.page_size // 2,
            "block_stride": self.page_size,
            "n_blocks": n_blocks, "block_size": block_size, "n_kv_heads": 1, "head_dim_k": dim, "head_dim_v": dim,
            "type": arrays.TYPES[self.kv_cache_dtype][0], "layout": lib.PAGED_LAYOUT_PLAIN})
        return KV.of(native, cache)

    def _take_pages(self, table, n_past, n_tokens, block_size):
        """Ids of all pages [batch, kv_heads, n]: those in use and the lowest free ones behind them."""
        n_used, n = -(-n_past // block_size), -(-n_tokens // block_size)
        allowed = min(self.max_blocks_per_head, table.shape[2])
        if n > allowed:
            raise NoBlocks(f"{n_tokens} tokens need {n} pages of {block_size} tokens a head, {allowed} are allowed "
                           f"(max_blocks_per_head {self.max_blocks_per_head}, block_table {table.shape[2]})")
        ids = np.empty((*table.shape[:2], n), np.int32)
        ids[:, :, :n_used] = table[:, :, :n_used]
        self._check_ids(ids[:, :, :n_used], table.shape[2])
        if n > n_used:
            free = np.ones(table.shape, bool)
            np.put_along_axis(free, ids[:, :, :n_used].astype(np.intp), False, 2)
            # The free ones first, each kind in ascending order.
            ids[:, :, n_used:] = np.argsort(~free, axis=2, kind="stable")[:, :, :n - n_used]
        return ids

    @staticmethod
    def _check_ids(ids, max_blocks):
        """The table lies with the caller, who may have changed it: a page that two entries name would be written twice."""
        if ids.size == 0:
            return
        if ids.min() < 0 or ids.max() >= max_blocks:
            raise InvalidArgument(f"block_table has ids {ids.min()} … {ids.max()}, not 0 … {max_blocks - 1}")
        ordered = np.sort(ids, axis=2)
        twice = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
        if len(twice):
            b, h, i = twice[0]
            raise InvalidArgument(f"block_table names page {ordered[b, h, i]} of batch entry {b}, head {h}, twice in its first "
                                  f"{ids.shape[2]} entries, which are in use; reset() forgets them")

    def _tabled(self, pool, n_kv_heads):
        """The pool with a table a head: heads take their blocks from the same ones."""
        native = ffi.new("paged_kv *", pool._kv[0])
        native.n_kv_heads = n_kv_heads
        return KV.of(native, pool._keep)

    def _run(self, q, pool, blocks, n_past):
        kv = self._tabled(pool, blocks.shape[1])
        if not self.gather:
            return self._compute(q, kv, blocks, n_past)
        out = np.empty(q.shape, q.dtype)
        n_keys = n_past + q.shape[2]
        for b in range(q.shape[0]):
            copy = kv.gather(Tables(blocks[b:b + 1], [n_keys]), 0, self.threads)
            out[b:b + 1] = self._compute(q[b:b + 1], copy, np.arange(copy.n_blocks, dtype=np.int32)[None], n_past)
        return out

    def _warmup(self, batch, n_kv_heads, n_keys):
        block_size = self.block_size()
        n_tokens = min(n_keys, block_size)
        zeros = [np.zeros((batch, heads, n_tokens, self.head_dim), np.float32)
                 for heads in (self.num_heads, n_kv_heads, n_kv_heads)]
        self._attention(n_kv_heads, block_size, min(ROWS, n_keys * batch), batch, n_keys)
        table = np.zeros((batch, n_kv_heads, 1), np.int32)
        cache = np.zeros((batch, n_kv_heads, self.page_size // self._item), arrays.TYPES[self.kv_cache_dtype][1])
        self(*zeros, table, cache)

    def reset(self, block_table: ArrayLike, kv_cache: ArrayLike) -> None:
        """Forgets what is in the cache and clears the table."""
        with self._lock:
            writable(view(block_table, "block_table"), "block_table")[...] = 0
            self._state(False, block_table, kv_cache).n_tokens = 0

    def num_tokens(self, block_table: ArrayLike, kv_cache: ArrayLike) -> int:
        """Tokens that each batch entry has in the cache."""
        with self._lock:
            return self._state(False, block_table, kv_cache).n_tokens

    def used_blocks(self, block_table: ArrayLike, kv_cache: ArrayLike, per_head: bool = False) -> int:
        """Pages in use: of one head, or of all heads of all batch entries. (The sum of a table is a sum of ids.)"""
        n = self.num_tokens(block_table, kv_cache)
        each = -(-n // self.block_size()) if n else 0
        return each if per_head else each * int(np.prod(view(block_table, "block_table").shape[:2]))

    def usage_bytes(self, block_table: ArrayLike, kv_cache: ArrayLike) -> tuple[int, int]:
        """(bytes reserved, bytes of pages in use) of the cache."""
        cache = view(kv_cache, "kv_cache")
        return cache.nbytes, self.used_blocks(block_table, kv_cache) * self.page_size

    def table_of(self, block_table: ArrayLike, kv_cache: ArrayLike, batch: int = 0, head: int = 0) -> BlockTable:
        """BlockTable of one batch entry and head."""
        n = self.used_blocks(block_table, kv_cache, per_head=True)
        return BlockTable(view(block_table, "block_table")[batch, head, :n], self.page_size)

    def resize(self, block_table: ArrayLike, kv_cache: ArrayLike, max_blocks: int) -> tuple[Any, Any]:
        """(block_table, kv_cache) with max_blocks pages a head and the same tokens, new arrays. max_blocks_per_head becomes
        max_blocks. NoBlocks: more pages than that are in use."""
        with self._lock:
            max_blocks = self._positive(max_blocks, "max_blocks")
            n_tokens = self.num_tokens(block_table, kv_cache)
            n = self.used_blocks(block_table, kv_cache, per_head=True)
            if n > max_blocks:
                raise NoBlocks(f"{n_tokens} tokens need {n} pages a head, {max_blocks} are wanted")
            old, cache = view(block_table, "block_table"), view(kv_cache, "kv_cache")
            page = self.page_size // self._item
            pages = cache.reshape(*old.shape, page)
            table = np.zeros((*old.shape[:2], max_blocks), np.int32)
            bigger = np.zeros((*old.shape[:2], max_blocks, page), cache.dtype)
            if n:
                used = old[:, :, :n]
                self._check_ids(used, old.shape[2])
                table[:, :, :n] = np.arange(n)
                bigger[:, :, :n] = np.take_along_axis(pages, used[..., None].astype(np.intp), 2)
            bigger = bigger.reshape(*old.shape[:2], max_blocks * page)
            table, bigger = arrays.like(table, block_table), arrays.like(bigger, kv_cache)
            self.max_blocks_per_head = max_blocks
            self._state(True, table, bigger).n_tokens = n_tokens
            return table, bigger


class StandardAttention(_Operator):
    """Attention over a contiguous cache that is reserved for max_seq_len tokens: the documents' baseline.

        output = attn(query, key, value, kv_cache)          kv_cache (batch, 2, kv_heads, max_seq_len, head_dim), written in place

    Shapes, types, state and bits are those of PagedAttention. Errors: InvalidArgument; TooLong with both numbers.
    """

    def __init__(self, num_heads: int | None = None, head_dim: int | None = None, max_seq_len: int = 8192,
                 kv_cache_dtype: DType = "float16", *, causal: bool = True, threads: int | None = None) -> None:
        super().__init__(num_heads, head_dim, kv_cache_dtype, causal, threads)
        self.max_seq_len = self._positive(max_seq_len, "max_seq_len")
        # Blocks of a contiguous array in their order; results do not depend on their size.
        self._block_size = int(np.gcd(self.max_seq_len, 64))

    def new_cache(self, batch: int = 1, n_kv_heads: int | None = None) -> np.ndarray:
        """A cache of zeros."""
        heads = self.num_heads if n_kv_heads is None else n_kv_heads
        if None in (heads, self.head_dim):
            raise InvalidArgument("num_heads and head_dim are not known before the first call; give them")
        return np.zeros((batch, 2, heads, self.max_seq_len, self.head_dim), arrays.TYPES[self.kv_cache_dtype][1])

    def __call__(self, query: ArrayLike, key: ArrayLike, value: ArrayLike, kv_cache: ArrayLike, max_new_tokens: int | None = None,
                 *, append: bool | None = None) -> Any:
        with self._lock:
            q, k, v = self._inputs(query, key, value, max_new_tokens)
            batch, n_kv_heads, n_new, dim = k.shape
            cache = writable(shaped(kv_cache, "kv_cache", (batch, 2, n_kv_heads, self.max_seq_len, dim),
                                    "(batch, 2, kv_heads, max_seq_len, head_dim)"), "kv_cache")
            if not cache.flags.c_contiguous or arrays.floating(cache, "kv_cache") != self.kv_cache_dtype:
                raise InvalidArgument(f"kv_cache is {cache.dtype} with strides {cache.strides}, not dense {self.kv_cache_dtype}")
            append = n_new == 1 if append is None else append
            n_past = self._state(False, kv_cache).n_tokens if append else 0
            if n_past + n_new > self.max_seq_len:
                raise TooLong(f"{n_past + n_new} tokens, the cache is reserved for {self.max_seq_len}")
            self._take_shape(q)
            order = np.arange(self.max_seq_len // self._block_size, dtype=np.int32)[None]
            # All heads in one row, as the writer wants them.
            slots = np.arange(n_kv_heads)[None, :, None] * self.max_seq_len + np.arange(n_past, n_past + n_new)
            out = np.empty(q.shape, q.dtype)
            for b in range(batch):
                self._write(self._layer(cache[b].reshape(2, 1, -1, dim)), k[b:b + 1], v[b:b + 1], slots)
                out[b:b + 1] = self._compute(q[b:b + 1], self._layer(cache[b]), order, n_past)
            self._state(True, kv_cache).n_tokens = n_past + n_new
            return arrays.like(out, query)

    def _layer(self, cache):
        """(2, heads, tokens, head_dim) as blocks in their order."""
        k, v = cache.reshape(*cache.shape[:2], -1, self._block_size, cache.shape[3]).swapaxes(1, 2)
        return KV(k, v)

    def _warmup(self, batch, n_kv_heads, n_keys):
        self._attention(n_kv_heads, self._block_size, min(ROWS, n_keys), 1, n_keys)
        zeros = [np.zeros((1, heads, 1, self.head_dim), np.float32) for heads in (self.num_heads, n_kv_heads, n_kv_heads)]
        self(*zeros, self.new_cache(1, n_kv_heads), append=False)

    def reset(self, kv_cache: ArrayLike) -> None:
        """Forgets what is in the cache."""
        with self._lock:
            self._state(False, kv_cache).n_tokens = 0

    def num_tokens(self, kv_cache: ArrayLike) -> int:
        """Tokens that each batch entry has in the cache."""
        with self._lock:
            return self._state(False, kv_cache).n_tokens
