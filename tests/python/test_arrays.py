"""Arrays of other people are used where they lie: a view has the pointer of its source, whatever protocol it speaks, and what is
written through it is written there."""

import array
import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import paged
from paged import arrays


def address(x):
    return x.__array_interface__["data"][0]


class ViaInterface:
    """Has __array_interface__ and nothing else."""

    def __init__(self, source):
        self.source = source
        self.__array_interface__ = source.__array_interface__


class Tensor:
    """Has DLPack and nothing else: a producer written from the protocol's description, of any element type and version."""

    DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def __init__(self, source, code, bits, version=None, device=(1, 0), flags=0, dense=False):
        self.source, self.device, self.version, self.flags = source, device, version, flags
        self.code, self.bits, self.dense = code, bits, dense
        self.deleted = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.version is None and options:
            raise TypeError("max_version")
        x = self.source
        shape, strides = ((ctypes.c_int64 * x.ndim)(*values) for values in (x.shape, [s // x.itemsize for s in x.strides]))
        managed = arrays._Managed() if self.version is None else arrays._Versioned(major=self.version, flags=self.flags)
        managed.tensor = arrays._Tensor(address(x) - 8, *self.device, x.ndim, self.code, self.bits, 1, shape,
                                        None if self.dense else strides, 8)
        self.keep = shape, strides, managed
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        # The destructor of a capsule gets the capsule.
        self.destructor = self.DELETER(lambda _: self.deleted.append(1))
        return new(ctypes.addressof(managed), name, ctypes.cast(self.destructor, ctypes.c_void_p))


@pytest.mark.parametrize("version", [None, 1])
@pytest.mark.parametrize("dtype, code, bits", [(np.float32, 2, 32), (np.float16, 2, 16), (np.int32, 0, 32), (np.int64, 0, 64),
                                               (np.uint16, 4, 16), (np.uint8, 1, 8)])
def test_dlpack(dtype, code, bits, version):
    source = np.arange(24).astype(dtype).reshape(2, 3, 4)[:, ::2]
    tensor = Tensor(source, code, bits, version)
    got = arrays.view(tensor)
    assert address(got) == address(source) and got.shape == source.shape and got.strides == source.strides
    if code == 4:
        assert got.dtype == ml_dtypes.bfloat16
        got = got.view(np.uint16)
    assert np.array_equal(got, source) and got.flags.writeable
    got[0, 0, 0] = 7
    assert source[0, 0, 0] == 7
    assert not tensor.deleted
    del got
    gc.collect()
    assert tensor.deleted == [1]


def test_dlpack_without_strides_is_dense():
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(arrays.view(Tensor(source, 2, 32, dense=True)), source)


@pytest.mark.parametrize("options, words", [({"device": (2, 1)}, r"device \(2, 1\)"), ({"code": 5}, "type 5"),
                                            ({"version": 2}, "DLPack 2.0")])
def test_dlpack_that_cannot_be_used(options, words):
    options = {"code": 2, "bits": 32, "version": 1, **options}
    with pytest.raises(paged.InvalidArgument, match=words):
        arrays.view(Tensor(np.zeros(3, np.float32), **options), "key")


def test_read_only_tensors_stay_so():
    assert not arrays.view(Tensor(np.zeros(3, np.float32), 2, 32, 1, flags=1)).flags.writeable


@pytest.mark.parametrize("make", [lambda x: x, ViaInterface, memoryview, lambda x: Tensor(x, 2, 32),
                                  lambda x: x.view(paged.seeds.Tensor)])
def test_a_view_has_the_pointer_of_its_source(make):
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = arrays.view(make(source))
    assert address(got) == address(source) and got.shape == (3, 4)


def test_buffers():
    source = array.array("f", [1, 2, 3])
    assert address(arrays.view(source)) == source.buffer_info()[0]


def test_a_view_keeps_its_source():
    source = np.zeros(8, np.float32)
    tensor = Tensor(source, 2, 32)
    alive = weakref.ref(source)
    got = arrays.view(ViaInterface(source))
    del source, tensor
    gc.collect()
    assert alive() is not None and got[0] == 0


def test_operands_are_not_copied():
    """f32 queries, keys and outputs are read and written where they lie, rows apart or not; so are caches."""
    memory = np.zeros((5, 2, 3, 8), np.float32)
    apart = memory[:, 1]
    for x in (apart, memory[:, 0].copy()):
        got, stride = arrays.rows_f32(x, "q", (5, 3, 8), "")
        assert address(got) == address(x) and stride == x.strides[0] // 4
    k, v = np.zeros((4, 2, 16, 8), np.float16), np.zeros((4, 2, 16, 8), np.float16)
    kv = paged.KV(k, v)
    assert address(kv.k) == address(k) and address(kv.v) == address(v)
    ones = np.ones((1, 2, 8), np.float32)
    kv.write(ones, 2 * ones, [17])
    assert (k[1, :, 1] == 1).all() and (v[1, :, 1] == 2).all() and k.sum() == 16
    attention = paged.Attention(2, 2, 8, layout="plain")
    attention.plan(kv, paged.Tables([[1]], [2]))
    out = np.zeros((1, 2, 8), np.float32)
    assert attention.run(Tensor(ones, 2, 32), out=ViaInterface(out)).source is out
    # Scores of the keys 0 and 1 (of eight ones) with a query of ones: 0 and 8 / sqrt(8).
    expected = 2 * np.exp(8 ** .5) / (1 + np.exp(8 ** .5))
    assert np.allclose(out, expected, rtol=1e-6)


def test_bf16_rounds_to_nearest_even():
    values = np.concatenate([np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 1e3,
                             np.float32([0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3e38])])
    out = np.empty(values.shape, ml_dtypes.bfloat16)
    arrays.from_f32(values, out)
    assert np.array_equal(out.view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(arrays.to_f32(out, "x"), out.astype(np.float32))
    nan = np.empty(1, np.uint16)
    arrays.from_f32(np.float32([np.nan]), nan)
    assert np.isnan(nan.view(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("x, words", [([1.5], "not integers"), ([[1]], "2 axes"), ([2**40], "outside of int32"),
                                      ([2**63], "outside")])
def test_numbers_that_are_none(x, words):
    with pytest.raises(paged.InvalidArgument, match=words):
        arrays.integers(x, "tokens", np.int32)
