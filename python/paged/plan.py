"""The planner: what keys and values will take, before there are any; include/paged/plan.h has the contract, `paged plan` the same
with a model file, a trace and pictures.

    plan = Plan(shape("llama-2-13b"), way="paged", block_size=16)
    plan.taken_bytes(1024)                # of a sequence of 1024 tokens
    plan.fit(50 << 30, 1024)              # sequences of that length in 50 GiB
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

from . import arrays
from ._native import ffi, lib
from .arrays import type_name
from .cache import BLOCK_SIZE, Group
from .errors import InvalidArgument, check, new_error
from .ops import choice, int32

__all__ = ["Plan", "Shape", "shape", "shapes"]

WAYS = {"paged": lib.PAGED_PLAN_PAGED, "contiguous": lib.PAGED_PLAN_CONTIGUOUS, "packed tails": lib.PAGED_PLAN_PACKED}


class Shape(NamedTuple):
    """A published model: n_heads of queries in a layer, tokens that it was made for, parameters, and its groups of layers."""

    name: str
    n_heads: int
    n_ctx: int
    n_params: int
    groups: Tuple[Group, ...]


def _shape(native) -> Shape:
    groups = tuple(Group(g.n_layers, g.n_kv_heads, g.head_dim_k, g.head_dim_v or None, window=g.window)
                   for g in native.groups[0:native.n_groups])
    return Shape(ffi.string(native.name).decode(), native.n_heads, native.n_ctx, native.n_params, groups)


def shapes() -> List[Shape]:
    """All shapes that have a name."""
    return [_shape(lib.paged_shape_at(i)) for i in range(lib.paged_shape_count())]


def shape(name: str) -> Shape:
    """The shape of this name, in any case. InvalidArgument if there is none."""
    native = lib.paged_shape_find(name.encode())
    if native == ffi.NULL:
        raise InvalidArgument(f"there is no shape '{name}'; paged.shapes() lists them")
    return _shape(native)


class Plan:
    """Bytes that a sequence takes when memory is given out in one of three ways: "paged" (blocks as tokens come), "contiguous" (one
    run of max_tokens from the first token on), "packed tails" (blocks, and tiles of 16 tokens for the last one).

    model: a Shape, or groups of layers. dtype: of keys and values, where the groups do not say. max_tokens: of the longest sequence;
    a Shape knows its own. Errors: InvalidArgument, Limit.
    """

    def __init__(self, model: Union[Shape, Sequence[Group]], way: str = "paged", block_size: int = BLOCK_SIZE,
                 max_tokens: Optional[int] = None, dtype: Optional[str] = None):
        groups = model.groups if isinstance(model, Shape) else tuple(model)
        if max_tokens is None:
            if not isinstance(model, Shape):
                raise InvalidArgument("max_tokens is missing; only a Shape knows its own")
            max_tokens = model.n_ctx
        native = ffi.new("paged_group_config[]", [g.fields() for g in groups])
        for g in native if dtype else ():
            g.type = arrays.TYPES[type_name(dtype)][0]
        self._plan, error = ffi.new("paged_plan *"), new_error()
        check(lib.paged_plan_init(self._plan, choice(way, WAYS, "way"), native, len(groups), int32(block_size, "block_size"),
                                  int32(max_tokens, "max_tokens"), error), error)

    def stored_bytes(self, n_tokens: int) -> int:
        """Keys and values that the newest of n_tokens tokens sees."""
        return lib.paged_plan_stored_bytes(self._plan, int32(n_tokens, "n_tokens"))

    def taken_bytes(self, n_tokens: int) -> int:
        """What the sequence takes while its newest token is computed."""
        return lib.paged_plan_taken_bytes(self._plan, int32(n_tokens, "n_tokens"))

    def peak_bytes(self, n_tokens: int) -> int:
        """The most that it takes on the way there."""
        return lib.paged_plan_peak_bytes(self._plan, int32(n_tokens, "n_tokens"))

    def fit(self, pool_bytes: int, n_tokens: int) -> int:
        """Sequences of n_tokens that a pool holds at once."""
        if pool_bytes < 0:
            raise InvalidArgument(f"a pool of {pool_bytes} bytes")
        return lib.paged_plan_fit(self._plan, pool_bytes, int32(n_tokens, "n_tokens"))

    @property
    def table_entries(self) -> int:
        """Of the block table of the longest sequence, in one group."""
        return lib.paged_plan_table_entries(self._plan)

    def table_bytes(self, n_seqs: int) -> int:
        """Of the tables of n_seqs sequences in all groups."""
        return lib.paged_plan_table_bytes(self._plan, int32(n_seqs, "n_seqs"))
