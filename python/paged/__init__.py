"""paged: a paged KV cache and paged attention.

    paged.Attention, paged.KV, paged.Tables           the operator: plan once a step, run once a layer
    paged.Cache, paged.Sequence, paged.Group          the cache: blocks, prefix reuse, fork with copy on write
    paged.Plan, paged.shapes                          what keys and values will take, before there are any
    paged.ascend                                      what an Ascend card's operators accept, and their layouts
    paged.LLM                                         the engine: a GGUF file in, text out (where it is built in)
    paged.PagedAttention, paged.StandardAttention     the interface of the documents; paged.seeds stands in for torch there

Arrays may be NumPy's or anything that has __array_interface__, the buffer protocol or DLPack on the CPU; they are not copied.
"""

from ._native import ffi as _ffi, lib as _lib
from . import ascend, seeds
from .attention import BlockTable, PagedAttention, StandardAttention
from .cache import Cache, Group, Match, Sequence, memory_bytes
from .conversation import ConversationCache, Turn
from .errors import *  # noqa: F403 (its __all__)
from .errors import __all__ as _errors
from .ops import KV, Attention, Shared, Tables, kernels, merge_states
from .plan import Plan, Shape, shape, shapes

if hasattr(_lib, "paged_service_create"):  # this build has the engine
    from .engine import LLM, Completion, Conversation, Stream

    __all__ = ["Completion", "Conversation", "LLM", "Stream"]
else:
    __all__ = []

__version__ = _ffi.string(_lib.paged_version()).decode()
__all__ += [*_errors, "Attention", "BlockTable", "Cache", "ConversationCache", "Group", "KV", "Match", "PagedAttention",
            "Plan", "Sequence", "Shape", "Shared", "StandardAttention", "Tables", "Turn", "ascend", "kernels", "memory_bytes",
            "merge_states", "seeds", "shape", "shapes"]
