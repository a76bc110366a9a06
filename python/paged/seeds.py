"""The few calls of torch that the documents' samples make, over NumPy, so that they run where there is no torch:

    import paged as ops_transformer
    import paged.seeds as torch

A Tensor is a NumPy array that knows npu(), cpu(), item() and device. All memory is this machine's: npu() gives the tensor back.
"""

import numpy as np

from . import arrays

__all__ = ["Tensor", "bfloat16", "float16", "float32", "int32", "int64", "manual_seed", "nn", "randn", "zeros"]

float16, float32, int32, int64 = (np.dtype(name) for name in ("float16", "float32", "int32", "int64"))
bfloat16 = arrays.BF16
_random = np.random.default_rng(0)


class Tensor(np.ndarray):
    """A NumPy array with torch's words for where it is."""

    device = "cpu"

    def npu(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.view(np.ndarray)

    def zero_(self):
        self[...] = 0
        return self


def _shape(shape):
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def zeros(*shape, dtype=float32, device=None):
    """zeros(2, 3) or zeros((2, 3))."""
    return np.zeros(_shape(shape), dtype).view(Tensor)


def randn(*shape, dtype=float32, device=None):
    """Normal numbers; the same ones in every run (see manual_seed)."""
    return _random.standard_normal(_shape(shape), np.float32).astype(dtype, copy=False).view(Tensor)


def manual_seed(seed):
    global _random
    _random = np.random.default_rng(seed)


class nn:
    """torch.nn, as far as the samples go."""

    class Module:
        def __call__(self, *args, **kwargs):
            return self.forward(*args, **kwargs)
