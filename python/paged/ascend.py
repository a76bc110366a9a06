"""What the paged-attention operators of Ascend cards accept, before a card is touched; include/paged/ascend.h has the contract,
docs/ascend.md the rules and their sources. Nothing of this ran on such a card.

    verdict = ascend.check("prefill", n_heads=32, n_kv_heads=8, head_dim=128, block_size=16)
    verdict.accepted                          # False
    verdict.findings[0].message               # "block_size is 16; prefill takes 128 to 512 in steps of 128: …"
    verdict.nearest_call["block_size"]        # 128

    ascend.check_arrays("scatter", slots=[0, 5, 5], block_size=128, n_blocks=4).accepted        # False: a slot twice
    ascend.convert(cache, "bnbsh", "pa_nz", n_kv_heads=8)                                       # to the byte
    ascend.export(kv, "pa_nz"), ascend.load(kv, "pa_nz", k, v)                                  # of a paged.KV
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from . import arrays
from ._native import ffi, lib
from .arrays import ArrayLike, DType, pointer, type_name
from .errors import InvalidArgument, check as check_status, new_error
from .ops import KV, choice, int32

__all__ = ["BLOCK_SIZE", "FACTS", "Finding", "Rule", "Verdict", "check", "check_arrays", "convert", "export", "load", "rules",
           "shape"]

BLOCK_SIZE = 128  # tokens, which decode advises and no path refuses
FACTS = "2026-11"  # PAGED_ASCEND_FACTS: the public documentation of then
MAX_FINDINGS = 64


def _words(name_of):
    """{"decode": 0, …}"""
    words, i = {}, 0
    while name_of(i) != ffi.NULL:
        words[ffi.string(name_of(i)).decode()] = i
        i += 1
    return words


PATHS, LAYOUTS, Q_LAYOUTS = (_words(f) for f in (lib.paged_ascend_path_name, lib.paged_ascend_layout_name,
                                                 lib.paged_ascend_q_layout_name))
FIELDS = list(_words(lib.paged_ascend_field_name))
_CHOICES = {"q_layout": Q_LAYOUTS, "kv_layout": LAYOUTS}


class Rule(NamedTuple):
    """One rule of the table: its stable id, the field it bears on, the paths that have it, whether it only warns, what it says,
    and which public page says so."""

    id: str
    field: str
    paths: Tuple[str, ...]
    warning: bool
    text: str
    source: str


class Finding(NamedTuple):
    """A rule that a call breaks: the value, the entry of an array (None: a field), the nearest legal value (None: there is none,
    or it is an array), and a sentence with the numbers."""

    rule: Rule
    value: int
    entry: Optional[int]
    nearest: Optional[Any]
    message: str


class Verdict(NamedTuple):
    """accepted: no rule refuses the call (warnings do not count). nearest_call: the call with each field at its nearest legal
    value, None where nothing had to move."""

    accepted: bool
    findings: List[Finding]
    call: Dict[str, Any]
    nearest_call: Optional[Dict[str, Any]]


def _rule(native):
    paths = tuple(name for name, i in PATHS.items() if native.paths >> i & 1)
    text = [ffi.string(s).decode() for s in (native.id, native.field, native.text, native.source)]
    return Rule(text[0], text[1], paths, native.warning, text[2], text[3])


def rules() -> List[Rule]:
    """The whole table."""
    return [_rule(lib.paged_ascend_rule_at(i)) for i in range(lib.paged_ascend_rule_count())]


def _word(name, value):
    """A value of a field as one says it; an int where it has no word."""
    if name in ("q_type", "kv_type"):
        return arrays.TYPE_NAMES.get(value, value)
    return next((word for word, i in _CHOICES.get(name, {}).items() if i == value), value)


def _config(path, fields):
    native = ffi.new("paged_ascend_config *")
    lib.paged_ascend_unset(native)
    native.path = choice(path, PATHS, "path")
    if "head_dim" in fields:
        fields.setdefault("head_dim_k", fields.pop("head_dim"))
    for name, value in fields.items():
        if name not in FIELDS:
            raise InvalidArgument(f"{name} is none of {', '.join(FIELDS)}")
        if name in ("q_type", "kv_type"):
            value = arrays.TYPES[type_name(value)][0]
        elif name in _CHOICES:
            value = choice(value, _CHOICES[name], name)
        setattr(native, name, int32(value, name))
    lib.paged_ascend_fill(native)
    return native


def _call(native):
    path = ffi.string(lib.paged_ascend_path_name(native.path)).decode()
    return {"path": path, **{name: _word(name, getattr(native, name)) for name in FIELDS}}


def _findings(native, n):
    for f in native[0:min(n, MAX_FINDINGS)]:
        rule = _rule(f.rule)
        yield Finding(rule, f.value, None if f.entry < 0 else f.entry, _word(rule.field, f.nearest) if f.has_nearest else None,
                      ffi.string(f.message).decode())


def check(path: str = "decode", **fields: Any) -> Verdict:
    """Whether the operators take such a call. path: decode, prefill, tnd, mla, atb, scatter or gather. fields: those of
    paged_ascend_config by name, types and layouts as words (head_dim stands for head_dim_k); what is left out is what one would
    take. Errors: InvalidArgument for a name or word that there is not."""
    native, found = _config(path, fields), ffi.new("paged_ascend_finding[]", MAX_FINDINGS)
    n = lib.paged_ascend_check(native, found, MAX_FINDINGS)
    accepted, call, nearest = lib.paged_ascend_accepts(native), _call(native), None
    if not accepted and lib.paged_ascend_nearest(native):
        nearest = _call(native)
    return Verdict(accepted, list(_findings(found, n)), call, nearest)


def check_arrays(path: str = "decode", table: Optional[ArrayLike] = None, lens_q: Optional[ArrayLike] = None,
                 lens_k: Optional[ArrayLike] = None, slots: Optional[ArrayLike] = None, n_tokens: int = 0,
                 **fields: Any) -> Verdict:
    """What those operators leave unchecked: block ids and -1 in tables, lengths against them, running sums, slots. The shape of
    the table gives batch, table_rows and table_cols where they are left out. Only the arrays are judged."""
    held = {"table": None if table is None else np.ascontiguousarray(table, np.int32)}
    for name, values in (("lens_q", lens_q), ("lens_k", lens_k), ("slots", slots)):
        held[name] = None if values is None else np.ascontiguousarray(values, np.int64).reshape(-1)
    if table is not None:
        if held["table"].ndim != 2:
            raise InvalidArgument(f"table has {held['table'].ndim} axes, not 2")
        rows, cols = held["table"].shape
        if (fields.setdefault("table_rows", rows), fields.setdefault("table_cols", cols)) != (rows, cols):
            raise InvalidArgument(f"table is {rows, cols}, table_rows {fields['table_rows']}, table_cols {fields['table_cols']}")
        fields.setdefault("batch", rows)
    native, found = _config(path, fields), ffi.new("paged_ascend_finding[]", MAX_FINDINGS)
    n, error = ffi.new("int32_t *"), new_error()
    types = {"table": "int32_t *", "lens_q": "int64_t *", "lens_k": "int64_t *", "slots": "int64_t *"}
    native_arrays = ffi.new("paged_ascend_arrays *", {
        **{name: pointer(types[name], a) for name, a in held.items() if a is not None},
        "n_lens_q": 0 if lens_q is None else held["lens_q"].size, "n_lens_k": 0 if lens_k is None else held["lens_k"].size,
        "n_slots": 0 if slots is None else held["slots"].size, "n_tokens": n_tokens})
    check_status(lib.paged_ascend_check_arrays(native, native_arrays, found, MAX_FINDINGS, n, error), error)
    findings = list(_findings(found, n[0]))
    return Verdict(all(f.rule.warning for f in findings), findings, _call(native), None)


# ---- layouts ----


def shape(layout: str, dtype: DType, n_blocks: int, block_size: int, n_kv_heads: int, head_dim: int) -> Tuple[int, ...]:
    """Axes of K (or V) in a layout: bnbsh, bnnbsd or pa_nz. InvalidArgument where head_dim does not fit it."""
    axes, n, error = ffi.new("int64_t[5]"), ffi.new("int32_t *"), new_error()
    sizes = [int32(x, "a size") for x in (n_blocks, block_size, n_kv_heads, head_dim)]
    kind, number = choice(layout, LAYOUTS, "layout"), arrays.TYPES[type_name(dtype)][0]
    check_status(lib.paged_ascend_shape(kind, number, *sizes, axes, n, error), error)
    return tuple(axes[0:n[0]])


def _sizes(array, layout, n_kv_heads):
    """n_blocks, block_size, n_kv_heads, head_dim of an array in a layout."""
    s = array.shape
    if layout == "bnnbsd" and len(s) == 4:
        return s[0], s[2], s[1], s[3]
    if layout == "pa_nz" and len(s) == 5:
        return s[0], s[3], s[1], s[2] * s[4]
    if layout == "bnbsh" and len(s) == 4:  # [blocks, block, heads, head_dim], as others write it
        return s
    if layout == "bnbsh" and len(s) == 3:
        if not n_kv_heads or s[2] % n_kv_heads:
            raise InvalidArgument(f"bnbsh rows have {s[2]} elements; n_kv_heads, which divides them, is {n_kv_heads}")
        return s[0], s[1], n_kv_heads, s[2] // n_kv_heads
    raise InvalidArgument(f"an array of shape {s} is not in {layout}")


def convert(array: ArrayLike, source: str, target: str, n_kv_heads: Optional[int] = None) -> np.ndarray:
    """K or V of all blocks from one layout to another, every bit as it is. n_kv_heads: of bnbsh with three axes, which do not
    say."""
    choice(source, LAYOUTS, "source"), choice(target, LAYOUTS, "target")
    array = np.ascontiguousarray(arrays.view(array))
    name, sizes, error = type_name(array.dtype), _sizes(array, source, n_kv_heads), new_error()
    if array.shape != (sizes if array.ndim == 4 and source == "bnbsh" else shape(source, name, *sizes)):
        raise InvalidArgument(f"an array of shape {array.shape} is not in {source}")
    out = np.empty(shape(target, name, *sizes), array.dtype)
    check_status(lib.paged_ascend_convert(LAYOUTS[source], LAYOUTS[target], arrays.TYPES[name][0], *sizes,
                                          pointer("void *", array), pointer("void *", out), error), error)
    return out


def _dense(parts):
    return ffi.new("paged_ascend_dense *", {name: pointer("void *" if len(name) == 1 else "float *", a)
                                            for name, a in parts.items() if a is not None})


def export(kv: KV, layout: str) -> Tuple[np.ndarray, ...]:
    """All blocks of a cache: (k, v), of int8 (k, v, k_scale, v_scale), scales [n_blocks, n_kv_heads, block_size]. Keys of int8
    are rotated as kv.h says, so queries must be, too."""
    dtype, error = arrays.TYPES[kv.type][1], new_error()
    parts = {name: np.empty(shape(layout, kv.type, kv.n_blocks, kv.block_size, kv.n_kv_heads, dim), dtype)
             for name, dim in (("k", kv.head_dim_k), ("v", kv.head_dim_v))}
    if kv.type == "i8":
        parts.update((name, np.empty((kv.n_blocks, kv.n_kv_heads, kv.block_size), np.float32)) for name in ("k_scale", "v_scale"))
    check_status(lib.paged_ascend_export(kv._kv, LAYOUTS[layout], _dense(parts), 0, 1, error), error)
    return tuple(parts.values())


def load(kv: KV, layout: str, k: ArrayLike, v: ArrayLike, k_scale: Optional[ArrayLike] = None,
         v_scale: Optional[ArrayLike] = None) -> None:
    """The way back: all blocks of the cache from such arrays."""
    dtype, error = arrays.TYPES[kv.type][1], new_error()
    choice(layout, LAYOUTS, "layout")
    parts = {}
    for name, a, dim in (("k", k, kv.head_dim_k), ("v", v, kv.head_dim_v)):
        parts[name] = np.ascontiguousarray(arrays.view(a))
        want = shape(layout, kv.type, kv.n_blocks, kv.block_size, kv.n_kv_heads, dim)
        if parts[name].shape != want or parts[name].dtype != dtype:
            raise InvalidArgument(f"{name} is {parts[name].dtype} {parts[name].shape}, the cache takes {dtype} {want}")
    for name, a in (("k_scale", k_scale), ("v_scale", v_scale)):
        if a is None:
            continue
        parts[name] = np.ascontiguousarray(a, np.float32)
        if parts[name].shape != (kv.n_blocks, kv.n_kv_heads, kv.block_size):
            raise InvalidArgument(f"{name} is {parts[name].shape}, not {(kv.n_blocks, kv.n_kv_heads, kv.block_size)}")
    check_status(lib.paged_ascend_import(kv._kv, LAYOUTS[layout], _dense(parts), 0, 1, error), error)
