"""The cache: who owns which block. `Cache` is a pool of blocks, `Sequence` a row of tokens in it; include/paged/mem.h has the
contract.

    cache = Cache(n_layers=2, n_kv_heads=4, head_dim=64, max_blocks=256)
    seq = cache.sequence()
    matched = seq.match(tokens)                      # what is cached of them, to the token
    seq.reserve(n)                                   # blocks; all or nothing
    cache.kv(layer=0).write(k, v, seq.slots())       # the reserved slots
    attention.plan(cache.kv(), cache.tables([seq]), [0, n])
    seq.commit(tokens[matched.n_matched:])           # now they count

Any thread may call; a cache lets one in at a time. A sequence that is dropped without close() gives its blocks back with the next
call on its cache: a finalizer runs at any moment, in any thread, so all it does is leave a note.
"""

from __future__ import annotations

import collections
import sys
import threading
from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Union

import numpy as np

from . import arrays
from ._native import ffi, lib
from .arrays import ArrayLike, DType, integers, pointer, type_name
from .errors import InvalidArgument, NoBlocks, Stale, TooLong, check, new_error
from .ops import KV, LAYOUTS, Tables, choice, int32

__all__ = ["Cache", "Group", "Match", "Sequence", "memory_bytes"]

BLOCK_SIZE = 16
Namespace = Optional[Dict[Union[str, int], Union[str, bytes]]]  # see _Namespace


class Group(NamedTuple):
    """Layers and KV heads that live and die together. window: keys that a query sees at most; 0: all."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    head_dim_v: Optional[int] = None
    dtype: str = "f16"
    layout: str = "packed"
    window: int = 0

    def fields(self):
        return {"n_layers": int32(self.n_layers, "n_layers"), "n_kv_heads": int32(self.n_kv_heads, "n_kv_heads"),
                "head_dim_k": int32(self.head_dim, "head_dim"), "head_dim_v": int32(self.head_dim_v or 0, "head_dim_v"),
                "type": arrays.TYPES[type_name(self.dtype)][0], "layout": choice(self.layout, LAYOUTS, "layout"),
                "window": int32(self.window, "window")}

    def block_bytes(self, block_size: int = BLOCK_SIZE) -> int:
        """Bytes of one block of block_size tokens."""
        return lib.paged_block_bytes(ffi.new("paged_group_config *", self.fields()), int32(block_size, "block_size"))


class Match(NamedTuple):
    """What of the tokens was cached: n_matched are committed now, n_copied of them lie in a block copied for this sequence, `why`
    it ended there ("none": all but the last were reused)."""

    n_matched: int
    n_copied: int
    why: str


def memory_bytes() -> int:
    """Memory that this process may still take: what the system says is available, limits of control groups respected."""
    return lib.paged_memory_available() or sys.maxsize


def read_config(config, allowed=("block_size", "max_blocks", "enable_paged")):
    """The documents' cache_config, checked: {"block_size": 16, "max_blocks": 100000, "enable_paged": True}."""
    if not isinstance(config, Mapping) or set(config) - set(allowed):
        raise InvalidArgument(f"cache_config is {config!r}; it has {', '.join(allowed)} and nothing else")
    return dict(config)


class _Pool:
    """The native cache with its memory. The arena is made usable as a whole, so that reading a block that nobody has taken finds
    zeros and not the end of the process; memory is still only taken where something is written."""

    def __init__(self, config, pool_bytes):
        error = new_error()
        arena = ffi.new("paged_arena *")
        check(lib.paged_arena_create_host(pool_bytes, arena, error), error)
        self._arena = arena
        check(arena.back(arena.ctx, 0, arena.size_bytes), None, f"a pool of {pool_bytes} bytes")
        config.arena = arena
        out = ffi.new("paged_cache **")
        check(lib.paged_cache_create(config, out, error), error)
        self.cache = out[0]
        self.left = collections.deque()  # handles of sequences that were dropped
        self.lock = threading.Lock()

    def __del__(self, free=lib.paged_cache_free):
        # Nobody has this any more, so nobody is in a call. The arena goes after the cache.
        if hasattr(self, "cache"):
            free(self.cache)
        if hasattr(self, "_arena"):
            self._arena.destroy(self._arena.ctx)


class Cache:
    """A pool of blocks of one or more groups.

    n_layers, n_kv_heads, head_dim, head_dim_v, dtype, layout, window   of its one group; or
    groups          a list of Group
    block_size      tokens, 1 … 1024; None: 16
    max_blocks      blocks of the pool (of every group, where there are several), or pool_bytes: bytes
    enable_paged    False: contiguous, a sequence takes max_seq_tokens at once (the baseline to compare with)
    cache_config    the three above as the documents write them
    max_seqs        sequences at once; max_seq_tokens: the longest, 0: what the pool holds
    budget_bytes    a pool above it is refused, with both numbers; None: memory_bytes()
    packed_tails, trim_after, poison   as mem.h says

    Errors: InvalidArgument naming the field, NoMemory, NoBlocks.
    """

    def __init__(self, n_layers: int | None = None, n_kv_heads: int | None = None, head_dim: int | None = None, *,
                 head_dim_v: int | None = None, dtype: DType = "f16", layout: str = "packed", window: int = 0,
                 groups: Iterable[Group] | None = None, block_size: int | None = None, max_blocks: int | None = None,
                 enable_paged: bool = True, cache_config: Mapping[str, Any] | None = None, pool_bytes: int | None = None,
                 max_seqs: int = 64, max_seq_tokens: int = 0, budget_bytes: int | None = None, packed_tails: bool = False,
                 trim_after: int = 0, poison: bool = False) -> None:
        if cache_config is not None:
            read = read_config(cache_config)
            block_size, max_blocks = read.get("block_size", block_size), read.get("max_blocks", max_blocks)
            enable_paged = read.get("enable_paged", enable_paged)
        if groups is None:
            if None in (n_layers, n_kv_heads, head_dim):
                raise InvalidArgument("n_layers, n_kv_heads and head_dim, or groups, must be given")
            groups = [Group(n_layers, n_kv_heads, head_dim, head_dim_v, dtype, layout, window)]
        block_size = int32(BLOCK_SIZE if block_size is None else block_size, "block_size")
        self.groups = tuple(Group(*group) for group in groups)
        pool_bytes = self._pool_bytes(block_size, max_blocks, pool_bytes, budget_bytes)
        native = ffi.new("paged_group_config[]", [group.fields() for group in self.groups])
        config = ffi.new("paged_cache_config *", {
            "struct_size": ffi.sizeof("paged_cache_config"), "groups": native, "n_groups": len(self.groups),
            "block_size": block_size, "pool_bytes": pool_bytes, "max_seqs": int32(max_seqs, "max_seqs"),
            "max_seq_tokens": int32(max_seq_tokens, "max_seq_tokens"), "poison": poison, "trim_after": trim_after,
            "contiguous": not enable_paged, "packed_tails": packed_tails})
        self.block_size = block_size
        self._pool = _Pool(config, pool_bytes)

    def _pool_bytes(self, block_size, max_blocks, pool_bytes, budget_bytes):
        each = [group.block_bytes(block_size) for group in self.groups]
        if not each or 0 in each:
            raise InvalidArgument(f"groups {self.groups} with blocks of {block_size} tokens have no size")
        if (max_blocks is None) == (pool_bytes is None):
            raise InvalidArgument("give one of max_blocks and pool_bytes")
        total = int(pool_bytes) if max_blocks is None else int(max_blocks) * sum(each)
        budget = memory_bytes() if budget_bytes is None else int(budget_bytes)
        if total < 1:
            raise InvalidArgument(f"a pool of {total} bytes")
        if total > budget:
            blocks = f"max_blocks {max_blocks} of {sum(each)} bytes need" if max_blocks is not None else "the pool needs"
            raise NoBlocks(f"{blocks} {total} bytes ({total / 1e9:.2f} GB), the budget is {budget} bytes ({budget / 1e9:.2f} GB)")
        return total

    def call(self, function, *args):
        """function(native cache, …) while nobody else is inside. First, what was dropped gives its blocks back."""
        pool = self._pool
        with pool.lock:
            while pool.left:
                lib.paged_seq_free(pool.cache, pool.left.popleft())
            return function(pool.cache, *args)

    def sequence(self) -> Sequence:
        """A new, empty Sequence. NoSequences: `max_seqs` are in use."""
        out = ffi.new("paged_seq *")
        status = self.call(lib.paged_seq_create, out)
        if status != lib.PAGED_OK:
            check(status, None, f"{self.stats()['max_seqs']} of {self.stats()['max_seqs']}")
        return Sequence(self, out[0])

    def kv(self, layer: int = 0, group: int = 0) -> KV:
        """KV of one layer, counted inside its group."""
        out = ffi.new("paged_kv *")
        status = self.call(lib.paged_cache_kv, int32(group, "group"), int32(layer, "layer"), out)
        check(status, None, f"layer {layer} of group {group}")
        return KV.of(out, self._pool)

    def tables(self, sequences: Iterable[Sequence], group: int = 0, n_reserved: int | None = None) -> Tables:
        """Tables of these sequences for Attention.plan. seqlens_k of each is its committed tokens and those that it has reserved,
        or n_reserved of them."""
        out = ffi.new("paged_tables *")

        def read(cache):
            check(lib.paged_cache_tables(cache, int32(group, "group"), out), None, f"group {group}")
            handles = [seq.handle(self) for seq in sequences]
            rows = [lib.paged_seq_row(cache, handle) for handle in handles]
            if -1 in rows:
                raise Stale(f"sequence {rows.index(-1)} is closed")
            max_seqs = _stats(cache).max_seqs
            reserved = [lib.paged_seq_reserved(cache, handle) if n_reserved is None else n_reserved for handle in handles]
            lengths = [lib.paged_seq_len(cache, handle) + n for handle, n in zip(handles, reserved)]
            firsts = [lib.paged_seq_first_k(cache, handle, group) for handle in handles]
            blocks = _borrowed(out.blocks, (max_seqs, out.max_blocks), (out.seq_stride, 1))[rows]
            tails = None
            if out.tail_tiles != ffi.NULL:
                n_tiles = self.block_size // lib.PAGED_TILE
                tails = _borrowed(out.tail_tiles, (max_seqs, n_tiles), (n_tiles, 1))[rows]
            return blocks, lengths, firsts if any(firsts) else None, tails

        return Tables(*self.call(read))

    def stats(self) -> dict[str, Any]:
        """Counters as a dict: n_blocks, n_free, n_used, n_cached, n_tokens, used_bytes, backed_bytes, n_copies, n_evicted …
        (mem.h)."""
        native = self.call(_stats)
        values = {}
        for name, field in ffi.typeof("paged_cache_stats").fields:
            value = getattr(native, name)
            values[name] = list(value) if field.type.kind == "array" else value
        values["n_misses"] = {_miss(i): n for i, n in enumerate(values["n_misses"])}
        return values

    def check(self) -> None:
        """Walks every invariant; Corrupt names the first one that does not hold."""
        error = new_error()
        check(self.call(lib.paged_cache_check, error), error)

    def block_refs(self, block: int, group: int = 0) -> int:
        """References to a block; 0: free or cached, -1: no such block."""
        return self.call(lib.paged_block_refs, int32(group, "group"), int32(block, "block"))

    def keep(self, tokens: ArrayLike, namespace: Namespace = None, priority: int = 0, until: int = 0) -> int:
        """Keeps what is cached of these tokens and returns how many that are: priority 0 … 255, pinned until the clock says
        `until`."""
        tokens = integers(tokens, "tokens", np.int32)
        n_kept, space = ffi.new("int32_t *"), _Namespace(namespace)
        check(self.call(lib.paged_prefix_keep, space.native, pointer("int32_t *", tokens), len(tokens),
                        int32(priority, "priority"), until, n_kept), None, "keep")
        return n_kept[0]

    def set_clock(self, now: int) -> None:
        """Tells the time, in your unit; pins that end by then are released, idle memory goes back (`trim_after`)."""
        self.call(lib.paged_cache_set_clock, now)

    def clear(self) -> None:
        """Evicts everything that is cached and neither in use nor pinned."""
        self.call(lib.paged_cache_clear)

    def trim(self, keep_bytes: int = 0) -> None:
        """Gives idle memory back to the system until at most keep_bytes of it are left."""
        check(self.call(lib.paged_cache_trim, keep_bytes), None, "trim")

    def set_max_bytes(self, max_bytes: int) -> None:
        """Changes the limit of the pool, live; 0: all of it."""
        check(self.call(lib.paged_cache_set_max_bytes, max_bytes), None, f"max_bytes {max_bytes}")

    def compact(self, budget_bytes: int, in_use: bool = False) -> int:
        """Copies blocks together so that memory becomes idle; returns the bytes moved. in_use: those of sequences, too; Tables
        and slots made before are wrong then."""
        moved = ffi.new("size_t *")
        check(self.call(lib.paged_cache_compact, budget_bytes, in_use, moved), None, "compact")
        return moved[0]


def _stats(cache):
    out = ffi.new("paged_cache_stats *")
    lib.paged_cache_get_stats(cache, out)
    return out


def _miss(number):
    return ffi.string(lib.paged_miss_name(number)).decode()


def _borrowed(address, shape, strides):
    """int32 of the library as an array; to be copied before the next call."""
    size = (shape[0] - 1) * strides[0] + shape[1]
    flat = np.frombuffer(ffi.buffer(address, size * 4), np.int32)
    return np.lib.stride_tricks.as_strided(flat, shape, [4 * stride for stride in strides])


class _Namespace:
    """What must be equal besides the tokens: a dict of kind to bytes or text. Kinds: "model", "adapter", "salt", "kv_type",
    "rope", "numerics", or a number from 7 on that is your own."""

    KINDS = {"model": lib.PAGED_NS_MODEL, "adapter": lib.PAGED_NS_ADAPTER, "salt": lib.PAGED_NS_SALT,
             "kv_type": lib.PAGED_NS_KV_TYPE, "rope": lib.PAGED_NS_ROPE, "numerics": lib.PAGED_NS_NUMERICS}

    def __init__(self, fields):
        pairs = []
        for kind, data in (fields or {}).items():
            number = kind if isinstance(kind, int) else choice(kind, self.KINDS, "namespace kind")
            pairs.append((int32(number, "namespace kind"), data.encode() if isinstance(data, str) else bytes(data)))
        pairs.sort()
        self._data = [ffi.from_buffer("char[]", data) for _, data in pairs]
        self._fields = ffi.new("paged_ns_field[]", [(kind, data, len(data)) for (kind, _), data in zip(pairs, self._data)])
        self.native = ffi.new("paged_namespace *", (self._fields, len(pairs)))


class Sequence:
    """Tokens in a cache; made by Cache.sequence() and fork(). len() is the number of committed tokens.

    Every call is all or nothing. close(), or the end of a `with`, gives the blocks back at once; a call after that is Stale.
    """

    __slots__ = ("_cache", "_seq", "__weakref__")

    def __init__(self, cache, handle):
        self._cache, self._seq = cache, handle

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        seq = getattr(self, "_seq", None)
        if seq is not None:
            self._cache._pool.left.append(seq)

    def close(self) -> None:
        """Gives everything back. A second time does nothing."""
        seq, self._seq = self._seq, None
        if seq is not None:
            check(self._cache.call(lib.paged_seq_free, seq), None, "close")

    def handle(self, cache):
        """The native handle; Stale if this is closed, InvalidArgument if it belongs to another cache."""
        if self._cache is not cache:
            raise InvalidArgument("the sequence belongs to another cache")
        return self._handle()

    def _handle(self):
        if self._seq is None:
            raise Stale("the sequence is closed")
        return self._seq

    def _call(self, function, *args):
        return self._cache.call(function, self._handle(), *args)

    def __len__(self) -> int:
        return max(0, self._call(lib.paged_seq_len))

    @property
    def reserved(self) -> int:
        """Tokens reserved beyond the committed ones."""
        return self._call(lib.paged_seq_reserved)

    @property
    def tokens(self) -> np.ndarray:
        """The committed tokens, int32, a copy."""
        def read(cache, seq):
            n = lib.paged_seq_len(cache, seq)
            if n <= 0:
                return np.empty(0, np.int32)
            return np.frombuffer(ffi.buffer(lib.paged_seq_tokens(cache, seq), 4 * n), np.int32).copy()

        return self._call(read)

    def match(self, tokens: ArrayLike, namespace: Namespace = None) -> Match:
        """Puts an empty sequence into a namespace and gives it what is cached of these tokens, to the token but for the last;
        returns a Match. A sequence that is never matched shares nothing. Errors: InvalidArgument (not empty, matched before),
        TooLong, NoMemory."""
        tokens = integers(tokens, "tokens", np.int32)
        out, space = ffi.new("paged_match *"), _Namespace(namespace)
        status = self._call(lib.paged_seq_match, space.native, pointer("int32_t *", tokens), len(tokens), out)
        check(status, None, f"match of {len(tokens)} tokens, with {len(self)} committed")
        return Match(out.n_matched, out.n_copied, _miss(out.why))

    def promise(self, tokens: ArrayLike, namespace: Namespace = None) -> bool:
        """Says which tokens an empty sequence is going to have; True: another one computes a beginning of them, so leave this one
        alone until `waits` is False, then match it."""
        tokens = integers(tokens, "tokens", np.int32)
        out, space = ffi.new("bool *"), _Namespace(namespace)
        check(self._call(lib.paged_seq_promise, space.native, pointer("int32_t *", tokens), len(tokens), out), None, "promise")
        return out[0]

    @property
    def waits(self) -> bool:
        """Whether another sequence still computes what this one promised."""
        return self._call(lib.paged_seq_waits) == 1

    def reserve(self, n_tokens: int) -> None:
        """Blocks for n_tokens behind the committed ones; replaces an earlier reservation, 0 gives it back. Errors: NoBlocks,
        TooLong."""
        n_tokens = int32(n_tokens, "n_tokens")

        def reserve(cache, seq):
            status = lib.paged_seq_reserve(cache, seq, n_tokens)
            if status == lib.PAGED_ERR_NO_BLOCKS:
                stats = _stats(cache)
                needed = lib.paged_seq_blocks_needed(cache, seq, 0, n_tokens)
                raise NoBlocks(f"{n_tokens} more tokens need {needed} blocks of {stats.block_size}, {stats.n_available} of "
                               f"{stats.n_blocks} are free or can be evicted")
            if status == lib.PAGED_ERR_TOO_LONG:
                raise TooLong(f"{n_tokens} tokens more than {lib.paged_seq_len(cache, seq)} are longer than a sequence may be")
            check(status, None, f"reserve of {n_tokens} tokens")

        self._call(reserve)

    def slots(self, first: int | None = None, n: int | None = None, group: int = 0) -> np.ndarray:
        """Slots of positions first … first + n - 1, int64; None: those of the reservation. InvalidArgument: not all of them
        committed or reserved, or fallen out of a window."""
        first = len(self) if first is None else int32(first, "first")
        n = len(self) + self.reserved - first if n is None else int32(n, "n")
        if n < 0:
            raise InvalidArgument(f"n is {n}")
        if n > len(self) + self.reserved:
            raise InvalidArgument(f"positions {first} … {first + n - 1}: {len(self)} are committed, {self.reserved} reserved")
        out = np.empty(n, np.int64)
        status = self._call(lib.paged_seq_slots, int32(group, "group"), first, n, pointer("int64_t *", out))
        check(status, None, f"slots of positions {first} … {first + n - 1} in group {group}")
        return out

    def commit(self, tokens: ArrayLike) -> None:
        """The first len(tokens) reserved slots hold keys and values of these tokens now. InvalidArgument: more than reserved."""
        tokens = integers(tokens, "tokens", np.int32)
        status = self._call(lib.paged_seq_commit, pointer("int32_t *", tokens), len(tokens))
        check(status, None, f"commit of {len(tokens)} tokens")

    def truncate(self, n_tokens: int) -> None:
        """Shortens to n_tokens committed tokens, drops any reservation, gives whole blocks back at once."""
        check(self._call(lib.paged_seq_truncate, int32(n_tokens, "n_tokens")), None, f"truncate to {n_tokens} tokens")

    def fork(self) -> Sequence:
        """A new Sequence with the same committed tokens in the same blocks; a shared block is copied before one of them writes
        into it. Errors: NoSequences."""
        out = ffi.new("paged_seq *")
        check(self._call(lib.paged_seq_fork, out), None, "fork")
        return Sequence(self._cache, out[0])

    def blocks_needed(self, n_tokens: int, group: int = 0) -> int:
        """Blocks that a reservation of n_tokens would take, copies on write included."""
        return self._call(lib.paged_seq_blocks_needed, int32(group, "group"), int32(n_tokens, "n_tokens"))

    def first_k(self, group: int = 0) -> int:
        """Position of the first key that a group with a window still has."""
        return self._call(lib.paged_seq_first_k, int32(group, "group"))

    @property
    def blocks(self) -> np.ndarray:
        """The block table of group 0: physical ids, -1 absent."""
        return self._cache.tables([self]).blocks[0, :-(-(len(self) + self.reserved) // self._cache.block_size)]

    def __repr__(self):
        return "Sequence(closed)" if self._seq is None else f"Sequence({len(self)} tokens)"
