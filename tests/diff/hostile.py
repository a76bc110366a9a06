"""A GGUF file as parts that can be taken out, bent and put together again, for hostile files.

Independent of our reader and of the `gguf` package: bytes are read and written here by hand.
"""
import copy
import dataclasses
import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
SIZES = {U8: 1, I8: 1, U16: 2, I16: 2, U32: 4, I32: 4, F32: 4, BOOL: 1, U64: 8, I64: 8, F64: 8}


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n & (2**64 - 1))


def f32(x):
    return struct.pack("<f", x)


def string(text, length=None):
    data = text if isinstance(text, bytes) else text.encode()
    return u64(len(data) if length is None else length) + data


def array(kind, items, count=None):
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


@dataclasses.dataclass
class Tensor:
    name: str
    dims: list
    kind: int
    offset: int
    n_dims: int | None = None  # None: len(dims)

    def bytes(self):
        n = len(self.dims) if self.n_dims is None else self.n_dims
        return string(self.name) + u32(n) + b"".join(map(u64, self.dims)) + u32(self.kind) + u64(self.offset)


class File:
    """kv: [[key, type, bytes of the value]], tensors: [Tensor], data: bytes after the padding."""

    def __init__(self, data):
        self.raw, self.at = data, 0
        self.magic, self.version = self._take(4), struct.unpack("<I", self._take(4))[0]
        n_tensors, n_kv = self._u64(), self._u64()
        self.n_tensors = self.n_kv = None  # None: as many as there are
        self.boundaries = [0, 4, 8, 16, 24]
        self.kv, self.tensors = [], []
        for _ in range(n_kv):
            key, kind = self._string(mark=True), self._u32(mark=True)
            start = self.at
            self._skip(kind)
            self.boundaries.append(self.at)
            self.kv.append([key, kind, data[start : self.at]])
        for _ in range(n_tensors):
            name, n_dims = self._string(mark=True), self._u32(mark=True)
            dims = [self._u64(mark=True) for _ in range(n_dims)]
            self.tensors.append(Tensor(name, dims, self._u32(mark=True), self._u64(mark=True)))
        start = -(-self.at // 32) * 32
        self.data = data[start:]
        self.boundaries += [start + t.offset for t in self.tensors] + [len(data) - 1]

    def _take(self, n):
        self.at += n
        return self.raw[self.at - n : self.at]

    def _u32(self, mark=False):
        if mark:
            self.boundaries.append(self.at)
        return struct.unpack("<I", self._take(4))[0]

    def _u64(self, mark=False):
        if mark:
            self.boundaries.append(self.at)
        return struct.unpack("<Q", self._take(8))[0]

    def _string(self, mark=False):
        length = self._u64(mark)
        if mark:
            self.boundaries += [self.at, self.at + length // 2]
        return self._take(length).decode()

    def _skip(self, kind):
        if kind == STR:
            self._string()
        elif kind == ARR:
            of, n = self._u32(mark=True), self._u64(mark=True)
            for _ in range(n) if of == STR else ():
                self._string()
            if of != STR:
                self._take(n * SIZES[of])
        else:
            self._take(SIZES[kind])

    # ---- bending ----

    def set(self, key, kind, value):
        for entry in self.kv:
            if entry[0] == key:
                entry[1:] = kind, value
                return self
        self.kv.append([key, kind, value])
        return self

    def remove(self, key):
        self.kv = [entry for entry in self.kv if entry[0] != key]
        return self

    def tensor(self, which, /, **changes):
        i = next(i for i, t in enumerate(self.tensors) if t.name == which)
        self.tensors[i] = dataclasses.replace(self.tensors[i], **changes)
        return self

    def copy(self):
        return copy.deepcopy(self)

    def bytes(self):
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.kv) if self.n_kv is None else self.n_kv
        head = self.magic + u32(self.version) + u64(n_tensors) + u64(n_kv)
        head += b"".join(string(key) + u32(kind) + value for key, kind, value in self.kv)
        head += b"".join(t.bytes() for t in self.tensors)
        return head + bytes(-len(head) % 32) + self.data


def _attr(name, value):
    return lambda f: setattr(f, name, value)


def _set(key, kind, value):
    return lambda f: f.set(key, kind, value)


def _tensor(which, /, **changes):
    return lambda f: f.tensor(which, **changes)


def _overlap(f):
    q = next(t for t in f.tensors if t.name == "blk.0.attn_q.weight")
    f.tensor("blk.0.attn_k.weight", offset=q.offset)


def _big_endian(f):
    f.version = struct.unpack(">I", u32(3))[0]


def _duplicate_tensor(f):
    f.tensors.append(f.tensors[0])


def _duplicate_key(f):
    f.kv.append(list(f.kv[-1]))


def _unknown_tensor(f):
    """One that is good in itself, and that no LLaMA has."""
    f.data += bytes(-len(f.data) % 32)
    f.tensors.append(Tensor("blk.0.attn_sinks.weight", [4], 0, len(f.data)))
    f.data += bytes(16)


EMBD, Q = "token_embd.weight", "blk.0.attn_q.weight"
SCALING, TOK = "llama.rope.scaling", "tokenizer.ggml"
EPS = "llama.attention.layer_norm_rms_epsilon"

# name -> (what is bent, a word that the one line of error must hold: the key, the tensor or the number)
CASES = {
    "magic": (_attr("magic", b"GGML"), ""),
    "version-1": (_attr("version", 1), "1"),
    "version-99": (_attr("version", 99), "99"),
    "big-endian": (_big_endian, "endian"),
    "n-tensors-2^60": (_attr("n_tensors", 2**60), str(2**60)),
    "n-tensors-negative": (_attr("n_tensors", 2**64 - 1), ""),
    "n-kv-2^60": (_attr("n_kv", 2**60), str(2**60)),
    "no-tensors": (_attr("tensors", []), "token_embd.weight"),
    "no-keys": (_attr("kv", []), "general.architecture"),
    "key-type-99": (_set("llama.block_count", 99, u32(2)), "llama.block_count"),
    "string-2^63": (_set("general.name", STR, string("x", 2**63)), "general.name"),
    "string-past-the-end": (_set("general.name", STR, string("x", 2**40)), "general.name"),
    "array-2^61": (_set(f"{TOK}.token_type", ARR, array(I32, [], 2**61)), f"{TOK}.token_type"),
    "array-2^64-1": (_set(f"{TOK}.tokens", ARR, array(STR, [], 2**64 - 1)), f"{TOK}.tokens"),
    "array-of-arrays": (_set("x.y", ARR, array(ARR, [array(U8, [b"1"])])), "x.y"),
    "bool-is-7": (_set(f"{TOK}.add_bos_token", BOOL, b"\x07"), f"{TOK}.add_bos_token"),
    "duplicate-key": (_duplicate_key, ""),
    "alignment-0": (_set("general.alignment", U32, u32(0)), "general.alignment"),
    "alignment-3": (_set("general.alignment", U32, u32(3)), "general.alignment"),
    "alignment-2^31": (_set("general.alignment", U32, u32(2**31)), "general.alignment"),
    "alignment-is-text": (_set("general.alignment", STR, string("32")), "general.alignment"),
    "architecture-unknown": (_set("general.architecture", STR, string("mamba9")), "mamba9"),
    "architecture-is-a-number": (_set("general.architecture", U32, u32(1)), "general.architecture"),
    "block-count-is-text": (_set("llama.block_count", STR, string("2")), "llama.block_count"),
    "block-count-0": (_set("llama.block_count", U32, u32(0)), "llama.block_count"),
    "block-count-2^32-1": (_set("llama.block_count", U32, u32(2**32 - 1)), "llama.block_count"),
    "block-count-more-than-there-are": (_set("llama.block_count", U32, u32(3)), "blk.2."),
    "context-is-f32": (_set("llama.context_length", F32, f32(1024)), "llama.context_length"),
    "context-0": (_set("llama.context_length", U32, u32(0)), "llama.context_length"),
    "context-negative": (_set("llama.context_length", I32, u32(2**32 - 1)), "llama.context_length"),
    "embedding-0": (_set("llama.embedding_length", U32, u32(0)), "llama.embedding_length"),
    "embedding-wrong": (_set("llama.embedding_length", U32, u32(128)), "128"),
    "ff-0": (_set("llama.feed_forward_length", U32, u32(0)), "llama.feed_forward_length"),
    "head-count-0": (_set("llama.attention.head_count", U32, u32(0)), "llama.attention.head_count"),
    "head-count-2^31": (_set("llama.attention.head_count", U32, u32(2**31)), "llama.attention.head_count"),
    "head-count-missing": (lambda f: f.remove("llama.attention.head_count"), "llama.attention.head_count"),
    "kv-heads-0": (_set("llama.attention.head_count_kv", U32, u32(0)), "llama.attention.head_count_kv"),
    "kv-heads-3-of-4": (_set("llama.attention.head_count_kv", U32, u32(3)), "3"),
    "key-length-0": (_set("llama.attention.key_length", U32, u32(0)), "llama.attention.key_length"),
    "key-length-100000": (_set("llama.attention.key_length", U32, u32(100000)), "llama.attention.key_length"),
    "eps-nan": (_set(EPS, F32, f32(float("nan"))), EPS),
    "eps-negative": (_set(EPS, F32, f32(-1.0)), EPS),
    "rope-dims-odd": (_set("llama.rope.dimension_count", U32, u32(7)), "llama.rope.dimension_count"),
    "rope-dims-too-many": (_set("llama.rope.dimension_count", U32, u32(512)), "llama.rope.dimension_count"),
    "rope-base-0": (_set("llama.rope.freq_base", F32, f32(0.0)), "llama.rope.freq_base"),
    "rope-base-inf": (_set("llama.rope.freq_base", F32, f32(float("inf"))), "llama.rope.freq_base"),
    "rope-scaling-unknown": (_set(f"{SCALING}.type", STR, string("spiral")), "spiral"),
    "rope-scaling-factor-0": (
        lambda f: f.set(f"{SCALING}.type", STR, string("linear")).set(f"{SCALING}.factor", F32, f32(0.0)),
        f"{SCALING}.factor",
    ),
    "rope-yarn-log-multiplier": (
        lambda f: f.set(f"{SCALING}.type", STR, string("yarn")).set(f"{SCALING}.yarn_log_multiplier", F32, f32(0.7)),
        f"{SCALING}.yarn_log_multiplier",
    ),
    "rope-original-context-0": (
        _set(f"{SCALING}.original_context_length", U32, u32(0)), f"{SCALING}.original_context_length",
    ),
    "window-negative": (_set("llama.attention.sliding_window", I32, u32(2**32 - 1)), "llama.attention.sliding_window"),
    "window-is-text": (_set("llama.attention.sliding_window", STR, string("all")), "llama.attention.sliding_window"),
    "scale-nan": (_set("llama.attention.scale", F32, f32(float("nan"))), "llama.attention.scale"),
    "not-causal": (_set("llama.attention.causal", BOOL, b"\0"), "llama.attention.causal"),
    "unknown-tensor": (_unknown_tensor, "blk.0.attn_sinks.weight"),
    "experts": (_set("llama.expert_count", U32, u32(8)), "8"),
    "template-is-a-number": (_set("tokenizer.chat_template", U32, u32(1)), "tokenizer.chat_template"),
    "tokenizer-unknown": (_set(f"{TOK}.model", STR, string("t9")), "t9"),
    "pre-split-unknown": (_set(f"{TOK}.pre", STR, string("scissors")), "scissors"),
    "tokens-are-numbers": (_set(f"{TOK}.tokens", ARR, array(I32, [u32(1)] * 269)), f"{TOK}.tokens"),
    "no-vocabulary": (_set(f"{TOK}.tokens", ARR, array(STR, [])), f"{TOK}.tokens"),
    "vocabulary-too-small": (_set(f"{TOK}.tokens", ARR, array(STR, [string("a"), string("b")])), ""),
    "token-types-too-few": (_set(f"{TOK}.token_type", ARR, array(I32, [u32(1)] * 5)), f"{TOK}.token_type"),
    "eos-outside": (_set(f"{TOK}.eos_token_id", U32, u32(10**9)), f"{TOK}.eos_token_id"),
    "zero-dim": (_tensor(Q, dims=[64, 0]), Q),
    "n-dims-0": (_tensor(Q, dims=[]), Q),
    "n-dims-5": (_tensor(Q, dims=[1, 1, 1, 1, 1]), Q),
    "n-dims-2^32-1": (_tensor(Q, n_dims=2**32 - 1), ""),
    "dims-wrap": (_tensor(Q, dims=[2**33, 2**33]), Q),
    "dims-negative": (_tensor(Q, dims=[64, 2**64 - 64]), Q),
    "shape-wrong": (_tensor(Q, dims=[64, 32]), Q),
    "shape-turned": (_tensor(EMBD, dims=[269, 64]), EMBD),
    "offset-near-2^64": (_tensor(Q, offset=2**64 - 32), Q),
    "offset-outside": (_tensor(Q, offset=2**40), Q),
    "offset-misaligned": (_tensor(Q, offset=7), Q),
    "overlap": (_overlap, "blk.0.attn_"),
    "type-removed-4": (_tensor(Q, kind=4), Q),
    "type-unknown-250": (_tensor(Q, kind=250), Q),
    "type-i32-for-a-matrix": (_tensor(Q, kind=26), Q),
    "norm-as-f16": (_tensor("output_norm.weight", kind=1), "output_norm.weight"),
    "duplicate-tensor": (_duplicate_tensor, ""),
    "tensor-renamed": (_tensor(Q, name="blk.0.attn_q.wait"), Q),
}
