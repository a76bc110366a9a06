"""Other people's arrays, without copies: NumPy, whatever has `__array_interface__` or the buffer protocol, and DLPack on the CPU
(torch, jax, mlx and others).

bf16 has no type in NumPy. It is taken as torch's, jax's or ml_dtypes' bfloat16, and an array of uint16 where floating point is
asked for is held to be its bits. What comes out as bf16 is ml_dtypes' where that package is there, else uint16.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import sys
import threading
from typing import Any

import numpy as np

from ._native import ffi, lib
from .errors import InvalidArgument

try:
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:
    _bfloat16 = np.uint16
BF16 = np.dtype(_bfloat16)

ArrayLike = Any  # an array, a tensor, a buffer, or a list of numbers
DType = Any  # "float16", "f16", numpy.float16, torch.float16 …

# name of a type: (paged_type, NumPy's type of an element)
TYPES = {
    "f16": (lib.PAGED_TYPE_F16, np.dtype(np.float16)),
    "f32": (lib.PAGED_TYPE_F32, np.dtype(np.float32)),
    "bf16": (lib.PAGED_TYPE_BF16, BF16),
    "i8": (lib.PAGED_TYPE_I8, np.dtype(np.int8)),
}
TYPE_NAMES = {value: name for name, (value, _) in TYPES.items()}
_WORDS = {"f16": "f16", "float16": "f16", "half": "f16", "f32": "f32", "float32": "f32", "float": "f32", "bf16": "bf16",
          "bfloat16": "bf16", "uint16": "bf16", "i8": "i8", "int8": "i8"}


def type_name(dtype):
    """"f16", "f32", "bf16" or "i8" of such a word, of a NumPy type, or of torch's (torch.float16)."""
    word = np.dtype(dtype).name if isinstance(dtype, (type, np.dtype)) else str(dtype).rpartition(".")[2]
    if word not in _WORDS:
        raise InvalidArgument(f"type {dtype!r} is none of float16, float32, bfloat16, int8")
    return _WORDS[word]


# ---- DLPack ----


class _Tensor(ctypes.Structure):
    """DLTensor. Shape and strides are in elements; no strides: dense."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    """DLManagedTensor, before DLPack 1.0."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, from DLPack 1.0 on."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor)]


_CPU = (1, 3, 13)  # kDLCPU, kDLCUDAHost, kDLCUDAManaged: all can be read here
_READ_ONLY = 1
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}
_BFLOAT = 4

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


class _Holder:
    """What NumPy keeps as the base of the view. The capsule keeps its name, so that its own destructor frees the tensor with
    it."""

    def __init__(self, capsule, interface):
        self.capsule = capsule
        self.__array_interface__ = interface


def _from_dlpack(x, name):
    """A view of the tensor's memory. NumPy's own from_dlpack knows no bfloat16 and takes much for read-only."""
    device = tuple(x.__dlpack_device__())
    if device[0] not in _CPU:
        raise InvalidArgument(f"{name} lies on device {device} (DLPack's numbers), not in this machine's memory")
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = x.__dlpack__()
    read_only = False
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise InvalidArgument(f"{name} speaks DLPack {managed.major}.{managed.minor}; 0.x and 1.x are known here")
        read_only = bool(managed.flags & _READ_ONLY)
    else:
        managed = _Managed.from_address(_get_pointer(capsule, b"dltensor"))
    tensor = managed.tensor
    is_bf16 = tensor.code == _BFLOAT and tensor.bits == 16
    if tensor.lanes != 1 or not (is_bf16 or tensor.code in _KINDS):
        raise InvalidArgument(f"{name} has elements of DLPack type {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes")
    size = tensor.bits // 8
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * size for i in range(tensor.ndim)) if tensor.strides else None
    typestr = "<u2" if is_bf16 else f"<{_KINDS[tensor.code]}{size}"
    if 0 in shape:
        array = np.empty(shape, typestr)
    else:
        array = np.asarray(_Holder(capsule, {
            "version": 3, "typestr": typestr, "shape": shape, "strides": strides,
            "data": ((tensor.data or 0) + tensor.byte_offset, read_only)}))
    return array.view(BF16) if is_bf16 else array


# ---- views ----


def view(x, name="array"):
    """x as a NumPy array over the same memory. Lists and numbers, which have no memory of their own, are copied."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, name)
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        pass
    array = np.asarray(x)
    if array.dtype == object:
        raise InvalidArgument(f"{name} is a {type(x).__name__}, of which no array can be made")
    return array


def shaped(x, name, shape, words):
    """A view that has the shape; None in it is any size. `words` says the shape to people."""
    array = view(x, name)
    if array.ndim != len(shape) or any(want is not None and have != want for have, want in zip(array.shape, shape)):
        wanted = ", ".join("?" if want is None else str(want) for want in shape)
        raise InvalidArgument(f"{name} has shape {array.shape}, not ({wanted}): {words}")
    return array


def floating(array, name):
    """The type of its elements, "f32", "f16" or "bf16"; anything else is refused."""
    kind = array.dtype
    if kind == np.float32:
        return "f32"
    if kind == np.float16:
        return "f16"
    if kind == BF16 or kind == np.uint16:
        return "bf16"
    raise InvalidArgument(f"{name} has elements of type {kind}, not float32, float16 or bfloat16")


def to_f32(array, name, out=None):
    """As f32; without a copy where it is that already and no `out` is given."""
    kind = floating(array, name)
    if kind == "f32" and out is None:
        return array
    if out is None:
        out = np.empty(array.shape, np.float32)
    if kind == "bf16":
        bits = out.view(np.uint32)
        np.copyto(bits, array.view(np.uint16))
        bits <<= 16
    else:
        np.copyto(out, array)
    return out


def from_f32(values, out):
    """Rounds f32 to the type of `out`, to nearest even."""
    if out.dtype == np.float32 or out.dtype == np.float16:
        np.copyto(out, values, casting="same_kind")
        return
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded[np.isnan(values)] = 0x7FC0
    np.copyto(out.view(np.uint16), rounded, casting="unsafe")


def writable(array, name):
    if not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only")
    return array


def dense_rows(array):
    """Whether all axes behind the first lie close together, so that one stride says where rows are."""
    size = array.itemsize
    for axis in range(array.ndim - 1, 0, -1):
        if array.shape[axis] > 1 and array.strides[axis] != size:
            return False
        size *= array.shape[axis]
    return array.shape[0] < 2 or (array.strides[0] >= size and array.strides[0] % array.itemsize == 0)


def rows_f32(x, name, shape, words):
    """(array, stride): rows of f32 whose elements lie close together, and the elements from one row to the next. A copy is made
    only where it has to be."""
    array = to_f32(shaped(x, name, shape, words), name)
    if not dense_rows(array):
        array = np.ascontiguousarray(array)
    stride = array.strides[0] // 4 if array.shape[0] > 1 else 0
    return array, stride


def integers(x, name, kind, ndim=1):
    """Numbers as a dense array of their own, so that nobody changes them while the library reads them."""
    array = view(x, name)
    if array.dtype == kind and array.ndim == ndim:
        return array.copy()
    if array.size == 0:
        array = array.astype(kind)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} has elements of type {array.dtype}, not integers")
    if array.ndim != ndim:
        raise InvalidArgument(f"{name} has {array.ndim} axes, not {ndim}")
    copy = np.array(array, kind, order="C")
    if array.dtype.itemsize >= copy.dtype.itemsize and array.dtype != copy.dtype and not np.array_equal(copy, array):
        raise InvalidArgument(f"{name} has a number outside of {np.dtype(kind).name}")
    return copy


def pointer(ctype, array):
    """The address of the first element. The caller keeps the array as long as it is used."""
    return ffi.cast(ctype, array.__array_interface__["data"][0])


def like(array, model):
    """An array in the clothes of another one: torch's tensors for torch's, subclasses of NumPy's for themselves."""
    if isinstance(model, np.ndarray):
        return array.view(type(model))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.Tensor):
        if model.dtype == torch.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    return array


# ---- threads ----

THREADS_MAX = 1024

_pool_lock = threading.Lock()
_pool = None
_pool_size = 0


def _forget_pool():
    """A child of fork has no threads but its own."""
    global _pool, _pool_size, _pool_lock
    _pool, _pool_size, _pool_lock = None, 0, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def parallel(n, call):
    """call(ith, n) for ith = 0 … n - 1, on as many threads; returns the results when all have come back."""
    global _pool, _pool_size
    if not 1 <= n <= THREADS_MAX:
        raise InvalidArgument(f"threads is {n}, not in 1 … {THREADS_MAX}")
    if n == 1:
        return [call(0, 1)]
    with _pool_lock:
        if _pool_size < n - 1:
            # The old one ends when its last work is done.
            _pool, _pool_size = concurrent.futures.ThreadPoolExecutor(n - 1, "paged"), n - 1
        others = [_pool.submit(call, ith, n) for ith in range(1, n)]
    try:
        first = call(0, n)
    finally:
        concurrent.futures.wait(others)
    return [first, *(other.result() for other in others)]


def cpu_count():
    """CPUs that this process may use: affinity and the group's quota respected."""
    return lib.paged_cpu_count()
