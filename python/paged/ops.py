"""The operator: keys and values in blocks (`KV`), block tables (`Tables`), attention planned once a step and run once a layer
(`Attention`). What the numbers mean is written in include/paged/ops.h and kv.h; this is the same, with arrays for pointers.

Arrays are used where they lie, through views (see arrays.py); what has to be f32 and is not is converted. Index arrays (tables,
slots, lengths) are copied, since the library reads memory by them. No call holds the GIL while it computes. An Attention serves
one thread at a time and makes others wait; a KV may be written from several, in different slots.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from typing import Sequence as Sequence_

import numpy as np

from . import arrays
from ._native import ffi, lib
from .arrays import ArrayLike, DType, integers, parallel, pointer, rows_f32, shaped, type_name, writable
from .errors import InvalidArgument, check, new_error

__all__ = ["Attention", "KV", "Shared", "Tables", "merge_states"]

LAYOUTS = {"plain": lib.PAGED_LAYOUT_PLAIN, "packed": lib.PAGED_LAYOUT_PACKED}
ORDERS = {"heads_first": lib.PAGED_DENSE_HEADS_FIRST, "tokens_first": lib.PAGED_DENSE_TOKENS_FIRST}


def choice(word, choices, name):
    if word not in choices:
        raise InvalidArgument(f"{name} is {word!r}, none of {', '.join(choices)}")
    return choices[word]


def int32(value, name):
    """A number that fits, so that cffi has nothing to say."""
    number = int(value)
    if not -2**31 <= number < 2**31:
        raise InvalidArgument(f"{name} is {number}, which 32 bits do not hold")
    return number


class KV:
    """The keys and values of one layer, in blocks: a paged_kv over memory that somebody owns.

    k, v     arrays [n_blocks, n_kv_heads, block_size, head_dim], float16, float32, bfloat16 or (packed) int8, whose two last axes
             are dense; they are written in place. Block strides of both must be equal.
    layout   "plain": as the shape says; "packed": the elements of a block and head lie as kv.h says, which the kernels read
             faster
    k_scale, v_scale   of int8 only: [n_blocks, n_kv_heads, block_size] float32

    Errors: InvalidArgument, naming what does not fit.
    """

    __slots__ = ("_kv", "_keep", "type", "layout")

    def __init__(self, k: ArrayLike, v: ArrayLike, layout: str = "plain", k_scale: ArrayLike | None = None,
                 v_scale: ArrayLike | None = None) -> None:
        k, v = (writable(shaped(x, name, (None,) * 4, "[n_blocks, n_kv_heads, block_size, head_dim]"), name)
                for name, x in (("k", k), ("v", v)))
        if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
            raise InvalidArgument(f"k is {k.shape} of {k.dtype}, v {v.shape} of {v.dtype}")
        name = type_name(k.dtype)
        kv = ffi.new("paged_kv *", {
            "n_blocks": k.shape[0], "n_kv_heads": k.shape[1], "block_size": k.shape[2], "head_dim_k": k.shape[3],
            "head_dim_v": v.shape[3], "type": arrays.TYPES[name][0], "layout": choice(layout, LAYOUTS, "layout"),
            "k": pointer("uint8_t *", k), "v": pointer("uint8_t *", v),
            "block_stride": self._block_stride(k, v), "k_head_stride": k.strides[1], "v_head_stride": v.strides[1]})
        keep = (k, v)
        for part, array in (("k", k), ("v", v)):
            if array.size and (array.strides[3] != array.itemsize or array.strides[2] != array.itemsize * array.shape[3]):
                raise InvalidArgument(f"the two last axes of {part} are not dense: strides {array.strides}")
        if name == "i8":
            scales = [writable(shaped(s, n, k.shape[:3], "[n_blocks, n_kv_heads, block_size]"), n)
                      for n, s in (("k_scale", k_scale), ("v_scale", v_scale))]
            if any(s.dtype != np.float32 or s.strides != scales[0].strides or s.strides[2] != 4 for s in scales):
                raise InvalidArgument("k_scale and v_scale must be float32, of equal strides, their last axis dense")
            kv.k_scale, kv.v_scale = (pointer("uint8_t *", s) for s in scales)
            kv.scale_block_stride, kv.scale_head_stride = scales[0].strides[:2]
            keep += tuple(scales)
        self._take(kv, keep)
        self.check_slots(())

    @staticmethod
    def _block_stride(k, v):
        if k.shape[0] > 1 and k.strides[0] != v.strides[0]:
            raise InvalidArgument(f"blocks of k are {k.strides[0]} bytes apart, those of v {v.strides[0]}")
        return k.strides[0]

    def _take(self, kv, keep):
        self._kv, self._keep = kv, keep
        self.type = arrays.TYPE_NAMES[kv.type]
        self.layout = "packed" if kv.layout == lib.PAGED_LAYOUT_PACKED else "plain"

    @classmethod
    def of(cls, kv, keep):
        """Over a paged_kv that the library filled; `keep` owns its memory."""
        self = object.__new__(cls)
        self._take(kv, keep)
        return self

    @classmethod
    def empty(cls, n_blocks: int, n_kv_heads: int, block_size: int, head_dim_k: int, head_dim_v: int | None = None,
              dtype: DType = "f16", layout: str = "packed") -> KV:
        """Memory of its own, zeros. The arguments are those of the shapes above."""
        name = type_name(dtype)
        element = arrays.TYPES[name][1]
        shapes = [(n_blocks, n_kv_heads, block_size, head_dim_k), (n_blocks, n_kv_heads, block_size, head_dim_v or head_dim_k)]
        if min(shapes[0] + shapes[1]) < 0 or min((shapes[0] + shapes[1])[1:4]) < 1:
            raise InvalidArgument(f"shapes are {shapes[0]} and {shapes[1]}")
        sizes = [int(np.prod(shape[1:])) for shape in shapes]
        memory = np.zeros((n_blocks, sum(sizes)), element)
        # Views: only the rest of a row is split.
        parts = [part.reshape(shape) for part, shape in zip(np.split(memory, [sizes[0]], axis=1), shapes)]
        scales = [np.zeros(shapes[0][:3], np.float32) for _ in parts] if name == "i8" else [None, None]
        return cls(*parts, layout=layout, k_scale=scales[0], v_scale=scales[1])

    n_blocks = property(lambda self: self._kv.n_blocks)
    n_kv_heads = property(lambda self: self._kv.n_kv_heads)
    block_size = property(lambda self: self._kv.block_size)
    head_dim_k = property(lambda self: self._kv.head_dim_k)
    head_dim_v = property(lambda self: self._kv.head_dim_v)
    k = property(lambda self: self._view(False), doc="View [n_blocks, n_kv_heads, block_size, head_dim_k] of the memory; in the "
                 "packed layout only its first two axes mean what they say.")
    v = property(lambda self: self._view(True), doc="As k, of the values.")

    def _view(self, is_v):
        kv = self._kv
        dim, base, head_stride = ((kv.head_dim_v, kv.v, kv.v_head_stride) if is_v else
                                  (kv.head_dim_k, kv.k, kv.k_head_stride))
        element = arrays.TYPES[self.type][1]
        shape = (kv.n_blocks, kv.n_kv_heads, kv.block_size, dim)
        if 0 in shape:
            return np.empty(shape, element)
        size = (kv.n_blocks - 1) * kv.block_stride + (kv.n_kv_heads - 1) * head_stride + kv.block_size * dim * element.itemsize
        owner = _Memory(int(ffi.cast("uintptr_t", base)), size, self._keep)
        strides = (kv.block_stride, head_stride, dim * element.itemsize, element.itemsize)
        return np.ndarray(shape, element, np.asarray(owner), 0, strides)

    def check_slots(self, slots: ArrayLike) -> np.ndarray:
        """Slots as a checked array of int64; InvalidArgument names the first one outside of the cache."""
        slots = integers(slots, "slots", np.int64)
        error = new_error()
        check(lib.paged_kv_check_slots(self._kv, pointer("int64_t *", slots), len(slots), error), error)
        return slots

    def write(self, k: ArrayLike, v: ArrayLike, slots: ArrayLike, threads: int = 1) -> int:
        """Writes keys and values into their slots and returns how many NaN were among them.

        k, v    [n_tokens, n_kv_heads, head_dim]; float32 is read where it lies, float16 and bfloat16 are converted
        slots   [n_tokens] block * block_size + offset; a negative one skips its token; no two may be equal
        threads share the tokens

        Rounds to nearest even and saturates. Errors: InvalidArgument.
        """
        kv = self._kv
        slots = self.check_slots(slots)
        k, k_stride = rows_f32(k, "k", (len(slots), kv.n_kv_heads, kv.head_dim_k), "[n_tokens, n_kv_heads, head_dim_k]")
        v, v_stride = rows_f32(v, "v", (len(slots), kv.n_kv_heads, kv.head_dim_v), "[n_tokens, n_kv_heads, head_dim_v]")
        args = (kv, pointer("float *", k), k_stride, pointer("float *", v), v_stride, pointer("int64_t *", slots), len(slots))
        if threads == 1:
            return lib.paged_kv_write(*args, 0, 1)
        return sum(parallel(threads, lambda ith, nth: lib.paged_kv_write(*args, ith, nth)))

    def read(self, slots: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of slots, the inverse of write: (k [n, n_kv_heads, head_dim_k], v […]) float32."""
        slots = self.check_slots(slots)
        kv = self._kv
        if slots.size and slots.min() < 0:
            raise InvalidArgument(f"slot {slots.min()} is negative")
        k = np.empty((len(slots), kv.n_kv_heads, kv.head_dim_k), np.float32)
        v = np.empty((len(slots), kv.n_kv_heads, kv.head_dim_v), np.float32)
        lib.paged_kv_read(kv, pointer("int64_t *", slots), len(slots), pointer("float *", k), pointer("float *", v))
        return k, v

    def _dense_shape(self, order, dim):
        kv = self._kv
        return ((kv.n_blocks, kv.n_kv_heads, kv.block_size, dim) if order == lib.PAGED_DENSE_HEADS_FIRST else
                (kv.n_blocks, kv.block_size, kv.n_kv_heads, dim))

    def _convert(self, direction, order, parts, threads):
        if self.type == "i8":
            function = getattr(lib, f"paged_kv_{direction}_i8")
            names = (("k", "int8_t *"), ("v", "int8_t *"), ("k_scale", "float *"), ("v_scale", "float *"))
            dense = (ffi.new("paged_dense_i8 *", {name: pointer(c, part) for (name, c), part in zip(names, parts)}),)
        else:
            function = getattr(lib, f"paged_kv_{direction}")
            dense = tuple(pointer("void *", part) for part in parts)

        def call(ith, nth):
            error = new_error()
            check(function(self._kv, order, *dense, ith, nth, error), error)

        parallel(threads, call)

    def _dense_parts(self, order):
        """(name, shape, type) of each array of the dense form."""
        kv = self._kv
        parts = [(name, self._dense_shape(order, dim), self.type) for name, dim in (("k", kv.head_dim_k), ("v", kv.head_dim_v))]
        if self.type == "i8":
            parts += [(name, self._dense_shape(order, 1)[:3], "f32") for name in ("k_scale", "v_scale")]
        return parts

    def export_dense(self, order: str = "heads_first", threads: int = 1) -> tuple[np.ndarray, ...]:
        """All blocks as dense arrays (k, v) of the cache's type: "heads_first" [n_blocks, n_kv_heads, block_size, head_dim] or
        "tokens_first" [n_blocks, block_size, n_kv_heads, head_dim]. Bytes are moved, never rounded. Of int8 (k, v, k_scale,
        v_scale): the scales are float32, of that shape without its last axis, and keys stay rotated as kv.h says."""
        order = choice(order, ORDERS, "order")
        parts = tuple(np.empty(shape, arrays.TYPES[dtype][1]) for _, shape, dtype in self._dense_parts(order))
        self._convert("export", order, parts, threads)
        return parts

    def import_dense(self, k: ArrayLike, v: ArrayLike, order: str = "heads_first", threads: int = 1,
                     k_scale: ArrayLike | None = None, v_scale: ArrayLike | None = None) -> None:
        """The inverse: k and v have the shapes that export_dense gives, and the cache's type; of int8, and of that only, the
        scales come along. InvalidArgument names what int8 does not hold: -128, and scales that are negative, not finite or
        beyond all that `write` gives."""
        order = choice(order, ORDERS, "order")
        given, parts = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}, []
        if self.type != "i8" and not (k_scale is None and v_scale is None):
            raise InvalidArgument(f"scales are given, which a cache of {self.type} does not have")
        for name, shape, dtype in self._dense_parts(order):
            array = np.ascontiguousarray(shaped(given[name], name, shape, "as export_dense gives it"))
            if type_name(array.dtype) != dtype:
                raise InvalidArgument(f"{name} is of {array.dtype}, not of {dtype}, as a cache of {self.type} has it")
            parts.append(array)
        self._convert("import", order, parts, threads)

    def gather(self, tables: Tables, seq: int = 0, threads: int = 1) -> KV:
        """Keys and values of one sequence of `tables` in one piece, as a KV of its own whose block i is block i of the sequence.
        In the plain layout `gathered.k` is dense in each head. This is attention's other way: copy first, then compute."""
        kv = self._kv
        native = tables.native()
        if not 0 <= seq < native.n_seqs:
            raise InvalidArgument(f"sequence {seq} of {native.n_seqs}")
        n_blocks = -(-int(tables.seqlens_k[seq]) // kv.block_size)
        to = self._in_one_piece(n_blocks)

        def call(ith, nth):
            error = new_error()
            check(lib.paged_kv_gather(kv, native, seq, to._kv, ith, nth, error), error)

        parallel(threads, call)
        return to

    def _in_one_piece(self, n_blocks):
        kv = self._kv
        if kv.head_dim_k != kv.head_dim_v:  # one stride serves keys and values, so that only equal ones can be dense
            return KV.empty(n_blocks, kv.n_kv_heads, kv.block_size, kv.head_dim_k, kv.head_dim_v, self.type, self.layout)
        shape = (kv.n_kv_heads, n_blocks, kv.block_size, kv.head_dim_k)
        parts = [np.zeros(shape, arrays.TYPES[self.type][1]).swapaxes(0, 1) for _ in range(2)]
        scales = [np.zeros(shape[:3], np.float32).swapaxes(0, 1) for _ in parts] if self.type == "i8" else [None, None]
        return KV(*parts, layout=self.layout, k_scale=scales[0], v_scale=scales[1])

    def __repr__(self):
        kv = self._kv
        return (f"KV({kv.n_blocks} blocks of {kv.block_size} tokens, {kv.n_kv_heads} heads of {kv.head_dim_k}"
                f"{'' if kv.head_dim_v == kv.head_dim_k else f' and {kv.head_dim_v}'}, {self.type}, {self.layout})")


class _Memory:
    """Bytes at an address as an array; keeps their owner."""

    def __init__(self, address, size, owner):
        self.owner = owner
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}


class Tables:
    """Which blocks each sequence of a step has: a snapshot, copied from what it is made of.

    blocks      [n_seqs, max_blocks], or [n_seqs, n_kv_heads, max_blocks] for a table a head; physical ids, -1 absent
    seqlens_k   [n_seqs] keys of each sequence, those of this step included
    first_k     [n_seqs] first key that is still there (windows); None: all are
    tail_tiles  [n_seqs, block_size / 16] tiles of packed tails; None: no sequence has one
    """

    __slots__ = ("blocks", "seqlens_k", "first_k", "tail_tiles", "_native")

    def __init__(self, blocks: ArrayLike, seqlens_k: ArrayLike, first_k: ArrayLike | None = None,
                 tail_tiles: ArrayLike | None = None) -> None:
        self.seqlens_k = integers(seqlens_k, "seqlens_k", np.int32)
        n_seqs = len(self.seqlens_k)
        ndim = arrays.view(blocks, "blocks").ndim
        self.blocks = integers(blocks, "blocks", np.int32, 3 if ndim == 3 else 2)
        self.first_k = None if first_k is None else integers(first_k, "first_k", np.int32)
        self.tail_tiles = None if tail_tiles is None else integers(tail_tiles, "tail_tiles", np.int32, 2)
        for name in ("blocks", "first_k", "tail_tiles"):
            array = getattr(self, name)
            if array is not None and len(array) != n_seqs:
                raise InvalidArgument(f"{name} is of {len(array)} sequences, seqlens_k of {n_seqs}")
        per_head = self.blocks.ndim == 3
        self._native = ffi.new("paged_tables *", {
            "blocks": pointer("int32_t *", self.blocks), "seqlens_k": pointer("int32_t *", self.seqlens_k), "n_seqs": n_seqs,
            "max_blocks": self.blocks.shape[-1], "seq_stride": int(np.prod(self.blocks.shape[1:])),
            "head_stride": self.blocks.shape[2] if per_head else 0,
            "first_k": ffi.NULL if self.first_k is None else pointer("int32_t *", self.first_k),
            "tail_tiles": ffi.NULL if self.tail_tiles is None else pointer("int32_t *", self.tail_tiles)})
        if per_head and self.blocks.shape[2] == 0:
            raise InvalidArgument("a table a head needs at least one entry")
        for array in (self.blocks, self.seqlens_k, self.first_k, self.tail_tiles):
            if array is not None:
                array.flags.writeable = False

    def native(self):
        """The paged_tables, borrowed from this object."""
        return self._native

    def check_for(self, kv):
        """What the library takes from the caller's word: the sizes of the axes that only the cache knows."""
        if self.blocks.ndim == 3 and self.blocks.shape[1] != kv.n_kv_heads:
            raise InvalidArgument(f"blocks has tables of {self.blocks.shape[1]} heads, the cache has {kv.n_kv_heads}")
        if self.tail_tiles is not None and self.tail_tiles.shape[1] * lib.PAGED_TILE != kv.block_size:
            raise InvalidArgument(f"tail_tiles has {self.tail_tiles.shape[1]} tiles a sequence, a block of {kv.block_size} "
                                  f"tokens {kv.block_size // lib.PAGED_TILE}")


class Shared(NamedTuple):
    """A common beginning that is read once for n_seqs consecutive sequences: their first n_tokens lie in the same blocks."""

    first_seq: int
    n_seqs: int
    n_tokens: int


class Attention:
    """Attention through block tables. All memory is taken here; `plan` once a step, `run` once a layer.

    n_heads, n_kv_heads   query head h uses KV head h // (n_heads // n_kv_heads); None: as n_heads
    head_dim, head_dim_v  1 … 512; head_dim_v None: as head_dim
    block_size, dtype, layout   of the cache that it will read
    scale       None: 1 / sqrt(head_dim)
    causal      query i of n_q, with n_k keys, sees keys 0 … n_k - n_q + i; False: all
    window      keys that a query sees at most, its own included; 0: all
    softcap     0: off;   alibi: [n_heads] slopes, None: off
    max_q, max_seqs, max_k   largest step: queries of all sequences, sequences, keys of one
    max_shared_q   queries of all sequences that share a beginning; 0: none share
    threads     that run at once

    Errors: InvalidArgument naming the field, NoMemory.
    """

    def __init__(self, n_heads: int, n_kv_heads: int | None = None, head_dim: int = 64, *, head_dim_v: int | None = None,
                 block_size: int = 16, dtype: DType = "f16", layout: str = "packed", scale: float | None = None,
                 causal: bool = True, window: int = 0, softcap: float = 0.0, alibi: ArrayLike | None = None, max_q: int = 1,
                 max_seqs: int = 1, max_k: int = 4096, max_shared_q: int = 0, threads: int = 1) -> None:
        slopes = ffi.NULL
        if alibi is not None:
            alibi = np.ascontiguousarray(arrays.to_f32(shaped(alibi, "alibi", (n_heads,), "[n_heads]"), "alibi"))
            slopes = pointer("float *", alibi)
        config = ffi.new("paged_attn_config *", {
            "struct_size": ffi.sizeof("paged_attn_config"), "n_heads": int32(n_heads, "n_heads"),
            "n_kv_heads": int32(n_heads if n_kv_heads is None else n_kv_heads, "n_kv_heads"),
            "head_dim_k": int32(head_dim, "head_dim"), "head_dim_v": int32(head_dim_v or 0, "head_dim_v"),
            "block_size": int32(block_size, "block_size"), "type": arrays.TYPES[type_name(dtype)][0],
            "layout": choice(layout, LAYOUTS, "layout"), "scale": scale or 0.0, "non_causal": not causal,
            "window": int32(window, "window"),
            "softcap": softcap, "alibi": slopes, "n_threads_max": int32(threads, "threads"), "max_q": int32(max_q, "max_q"),
            "max_seqs": int32(max_seqs, "max_seqs"), "max_k": int32(max_k, "max_k"),
            "max_shared_q": int32(max_shared_q, "max_shared_q")})
        out, error = ffi.new("paged_attn **"), new_error()
        check(lib.paged_attn_create(config, out, error), error)
        # Freed where the last reference goes, in whichever thread: nobody can be in a call then, and it takes no lock.
        self._attn = ffi.gc(out[0], lib.paged_attn_free)
        self._lock = threading.Lock()
        self._io = ffi.new("paged_attn_io *")
        self._plan = None
        self.n_heads, self.head_dim, self.head_dim_v = config.n_heads, config.head_dim_k, config.head_dim_v or config.head_dim_k
        self.threads = config.n_threads_max or 1
        self.n_queries = 0

    @property
    def kernels(self) -> str:
        """"amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon" or "ref"."""
        return ffi.string(lib.paged_attn_kernels(self._attn)).decode()

    def plan(self, kv: KV, tables: Tables, cu_seqlens_q: ArrayLike | None = None, shared: Sequence_[Shared] = ()) -> None:
        """Checks a step against the cache and lays its work out.

        kv            KV of any layer of the group
        tables        Tables of the sequences
        cu_seqlens_q  [n_seqs + 1] sequence s owns the rows cu_seqlens_q[s] … cu_seqlens_q[s + 1] - 1 of q; None: one row each
        shared        Shared beginnings, ascending and apart

        Errors: InvalidArgument naming sequence, entry and value; Limit. The plan of before is gone then.
        """
        n_seqs = len(tables.seqlens_k)
        starts = np.arange(n_seqs + 1, dtype=np.int32) if cu_seqlens_q is None else integers(cu_seqlens_q, "cu_seqlens_q",
                                                                                             np.int32)
        if len(starts) != n_seqs + 1:
            raise InvalidArgument(f"cu_seqlens_q has {len(starts)} numbers, {n_seqs} sequences need {n_seqs + 1}")
        tables.check_for(kv)
        together = ffi.new("paged_shared[]", [tuple(int32(n, "shared") for n in each) for each in shared]) if shared else ffi.NULL
        batch = ffi.new("paged_batch *", {"cu_seqlens_q": pointer("int32_t *", starts), "tables": tables.native()[0],
                                          "n_shared": len(shared), "shared": together})
        error = new_error()
        with self._lock:
            self._plan = None
            check(lib.paged_attn_plan(self._attn, batch, kv._kv, error), error)
            self._plan = (kv, tables, starts, together, batch)
            self.n_queries = int(starts[-1])

    def run(self, q: ArrayLike, out: ArrayLike | None = None, *, kv: KV | None = None, lse: ArrayLike | None = None,
            sinks: ArrayLike | None = None) -> Any:
        """Attention of one layer; returns `out`.

        q      [n_q, n_heads, head_dim] float32, read where it lies; float16 and bfloat16 are converted
        out    [n_q, n_heads, head_dim_v] written in place, of any of these types; None: a new array of q's type
        kv     KV of this layer, of the shape that was planned; None: the one of plan
        lse    [n_q, n_heads] float32, written: natural logarithm of the sum of exp(score), sink included; None: none
        sinks  [n_heads] float32: a score that takes part in the sum and has no value; None: none

        A row that sees no key gives zeros. Errors: InvalidArgument, also where no plan is in force.
        """
        with self._lock:
            return self._run(q, out, kv, lse, sinks)

    def _run(self, q, out, kv, lse, sinks):
        if self._plan is None:
            raise InvalidArgument("there is no plan; call plan first")
        planned = self._plan[0]
        if kv is None:
            kv = planned
        elif kv is not planned:
            self._check_same(kv._kv, planned._kv)
        n, io = self.n_queries, self._io
        source = shaped(q, "q", (n, self.n_heads, self.head_dim), "[n_q, n_heads, head_dim]")
        rows, io.q_stride = rows_f32(source, "q", source.shape, "")
        io.q = pointer("float *", rows)
        if out is None:
            out = np.empty((n, self.n_heads, self.head_dim_v), source.dtype)
        target = writable(shaped(out, "out", (n, self.n_heads, self.head_dim_v), "[n_q, n_heads, head_dim_v]"), "out")
        direct = arrays.floating(target, "out") == "f32" and arrays.dense_rows(target)
        written = target if direct else np.empty(target.shape, np.float32)
        io.out, io.out_stride = pointer("float *", written), written.strides[0] // 4 if n > 1 else 0
        io.lse = io.sinks = ffi.NULL
        if lse is not None:
            lse = self._dense_f32(writable(shaped(lse, "lse", (n, self.n_heads), "[n_q, n_heads]"), "lse"), "lse")
            io.lse = pointer("float *", lse)
        if sinks is not None:
            sinks = self._dense_f32(shaped(sinks, "sinks", (self.n_heads,), "[n_heads]"), "sinks")
            io.sinks = pointer("float *", sinks)
        attn, native, nth = self._attn, kv._kv, self.threads
        if nth == 1:
            lib.paged_attn_run(attn, native, io, 0, 1)
            if lib.paged_attn_needs_merge(attn):
                lib.paged_attn_merge(attn, io, 0, 1)
        else:
            parallel(nth, lambda ith, nth: lib.paged_attn_run(attn, native, io, ith, nth))
            if lib.paged_attn_needs_merge(attn):
                parallel(nth, lambda ith, nth: lib.paged_attn_merge(attn, io, ith, nth))
        if not direct:
            arrays.from_f32(written, target)
        return out

    @staticmethod
    def _dense_f32(array, name):
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise InvalidArgument(f"{name} must be dense float32, not {array.dtype} with strides {array.strides}")
        return array

    @staticmethod
    def _check_same(kv, planned):
        for field in ("n_blocks", "block_size", "n_kv_heads", "head_dim_k", "head_dim_v", "type", "layout", "block_stride",
                      "k_head_stride",
                      "v_head_stride", "scale_block_stride", "scale_head_stride"):
            if getattr(kv, field) != getattr(planned, field):
                raise InvalidArgument(f"{field} of kv is {getattr(kv, field)}, of the planned one {getattr(planned, field)}")


def merge_states(out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike) -> None:
    """Attention over two disjoint sets of keys -> over both, in place of the first. out [n_q, n_heads, head_dim], lse [n_q,
    n_heads], all dense float32, lse as `run` writes it."""
    a = writable(shaped(out_a, "out_a", (None,) * 3, "[n_q, n_heads, head_dim]"), "out_a")
    b = shaped(out_b, "out_b", a.shape, "as out_a")
    la = writable(shaped(lse_a, "lse_a", a.shape[:2], "[n_q, n_heads]"), "lse_a")
    lb = shaped(lse_b, "lse_b", a.shape[:2], "[n_q, n_heads]")
    for name, array in (("out_a", a), ("lse_a", la), ("out_b", b), ("lse_b", lb)):
        Attention._dense_f32(array, name)
    lib.paged_attn_merge_states(pointer("float *", a), pointer("float *", la), pointer("float *", b), pointer("float *", lb),
                                a.shape[0] * a.shape[1], a.shape[2])


def kernels() -> str:
    """The kernels that attention over f16 gets on this machine."""
    return Attention(1, head_dim=64).kernels
