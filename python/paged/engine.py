"""The engine: a GGUF model with a paged cache and a thread of its own; include/paged/service.h has the contract.

    llm = LLM("model.gguf", n_ctx=4096, max_running=8)
    llm.generate("Once upon a time", max_tokens=20).text
    llm.generate([prompt, prompt, prompt])           # run together; a common beginning is computed once
    for piece in llm.stream(prompt):                 # text as it comes
    llm.chat([{"role": "user", "content": "Hello"}])
    talk = llm.conversation(); talk.say("Hello"); talk.say("And then?")

Any thread may call; waiting holds no GIL. A Stream that is dropped cancels its request: its finalizer sets a flag in the engine,
as a signal handler may, and leaves a note for the next call to forget it.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
import weakref
from typing import Any, Iterable, List, Mapping, NamedTuple, Optional

import numpy as np

from . import arrays
from ._native import ffi, lib
from .arrays import ArrayLike, integers, pointer
from .cache import BLOCK_SIZE, memory_bytes, read_config
from .errors import InvalidArgument, Limit, NoBlocks, Stale, Unsupported, check, new_error
from .ops import choice, int32

__all__ = ["Completion", "Conversation", "LLM", "Stream"]

WAIT_MS = 200  # how long a wait is deaf to Ctrl-C

LINEAR = {"auto": lib.PAGED_LINEAR_AUTO, "int8": lib.PAGED_LINEAR_I8, "bf16": lib.PAGED_LINEAR_BF16}
KV_TYPES = {"auto": lib.PAGED_KV_AUTO, "f16": lib.PAGED_TYPE_F16, "f32": lib.PAGED_TYPE_F32, "bf16": lib.PAGED_TYPE_BF16, "i8": lib.PAGED_TYPE_I8}

# Options of a request that are one number or truth of paged_request.
NUMBERS = {"max_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int, "ignore_eos": bool,
           "control_text": bool, "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float,
           "min_tokens": int, "priority": int, "deadline_ms": int}


class Completion(NamedTuple):
    """An answer. finish: "stop", "length", "cancelled", "error", "deadline". logprobs: of each token, where asked for;
    top_logprobs: for each token a list of (token, logprob), best first. cached_tokens of prompt_tokens were found in the cache,
    not computed."""

    text: str
    tokens: List[int]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: Optional[List[float]] = None
    top_logprobs: Optional[list] = None
    stop_string: Optional[str] = None
    stop_token: Optional[int] = None
    n_preemptions: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class _Service:
    """The native model and service. Calls are counted, so that close() frees nothing under somebody's feet."""

    def __init__(self, path, config, linear):
        model, service, error = ffi.new("paged_model **"), ffi.new("paged_service **"), new_error()
        self.model = self.service = None
        self.left = collections.deque()  # ids of streams that were dropped
        self._idle = threading.Condition()
        self._inside, self._closed = 0, False
        how = ffi.new("paged_model_config *", {"struct_size": ffi.sizeof("paged_model_config"), "linear": linear})
        check(lib.paged_model_load(os.fsencode(path), how, model, error), error)
        self.model = model[0]
        # What the configuration says about the pool takes the model's shape.
        check(lib.paged_service_create(self.model, config(self.model), service, error), error)
        self.service = service[0]
        _open.add(self)

    @contextlib.contextmanager
    def calling(self):
        with self._idle:
            if self._closed:
                raise Stale("the LLM is closed")
            self._inside += 1
        try:
            while self.left:
                lib.paged_service_release(self.service, self.left.popleft())
            yield self.service
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()

    def drop(self, number):
        """From a finalizer, in any thread and at any moment. The lock is one that its holder may take again, and nobody who has
        it waits for another; at the end of the process all is closed."""
        if not self._closed:
            with self._idle:
                if not self._closed:
                    lib.paged_service_cancel(self.service, number)
                    self.left.append(number)

    def close(self):
        with self._idle:
            if self._closed:
                return
            self._closed = True
            # Whoever waits inside wakes within WAIT_MS and finds the door closed.
            while self._inside:
                self._idle.wait()
        self._free()

    def _free(self, free_service=lib.paged_service_free, free_model=lib.paged_model_free):
        service, self.service = self.service, None
        model, self.model = self.model, None
        if service is not None:
            free_service(service)
        if model is not None:
            free_model(model)

    def __del__(self):
        # Nobody has this any more, so nobody is inside; its thread runs no Python, so that waiting for its end cannot block.
        self._free()


_open = weakref.WeakSet()


@atexit.register
def _close_all():
    """Their threads must not compute while the process takes itself apart."""
    for service in list(_open):
        service.close()


class LLM:
    """A model that answers.

    model         path of a GGUF file
    n_ctx         tokens of the longest request; 0: the model's context, or less if the pool is smaller
    max_running   requests in one step; max_waiting: that wait, beyond them `submit` is refused and generate() waits
    pool_bytes    of the cache, or max_blocks; 0: what max_running requests of n_ctx need
    cache_config  {"block_size": 16, "max_blocks": 100000, "enable_paged": True} as the documents write it
    budget_bytes  a pool above it is refused with both numbers; None: memory_bytes()
    kv_type       "auto" (bf16 where the processor multiplies it, else f16; `info` says which), "f16", "f32", "bf16", "i8"
    linear        "auto", "int8", or "bf16" where the processor has AMX: how linear layers multiply quantised weights
                  (auto: int8; bf16 is faster for prompts and many requests, slower for one)
    threads       0: as many as this process has CPUs
    prefix_cache  False: requests share nothing
    ring_tokens   tokens that a stream's reader may lag behind; None: any number

    Errors: ReadWriteError, FormatError, Unsupported, InvalidArgument, NoMemory, NoBlocks, with what is wrong in which numbers.
    """

    def __init__(self, model: str | os.PathLike, *, n_ctx: int = 0, max_running: int = 8, max_waiting: int = 256,
                 block_size: int | None = None, max_blocks: int | None = None, pool_bytes: int = 0,
                 cache_config: Mapping[str, Any] | None = None, budget_bytes: int | None = None, kv_type: str = "auto",
                 chunk_tokens: int = 0, threads: int = 0, prefix_cache: bool = True, packed_tails: bool = True,
                 ring_tokens: int | None = None, linear: str = "auto") -> None:
        if cache_config is not None:
            read = read_config(cache_config)
            block_size, max_blocks = read.get("block_size", block_size), read.get("max_blocks", max_blocks)
            if not read.get("enable_paged", True):
                raise Unsupported("the engine's cache is paged; enable_paged False is a baseline of Cache")
        if max_blocks is not None and pool_bytes:
            raise InvalidArgument("give one of max_blocks and pool_bytes")
        config = ffi.new("paged_service_config *", {
            "struct_size": ffi.sizeof("paged_service_config"),
            "ring_tokens": 2**31 - 1 if ring_tokens is None else int32(ring_tokens, "ring_tokens")})
        engine = config.engine
        engine.struct_size = ffi.sizeof("paged_engine_config")
        engine.n_ctx, engine.max_running = int32(n_ctx, "n_ctx"), int32(max_running, "max_running")
        engine.max_waiting = int32(max_waiting, "max_waiting")
        engine.block_size = int32(block_size or 0, "block_size")
        engine.kv_type = choice(kv_type if kv_type == "auto" else arrays.type_name(kv_type), KV_TYPES, "kv_type")
        engine.chunk_tokens, engine.n_threads = int32(chunk_tokens, "chunk_tokens"), int32(threads, "threads")
        engine.no_prefix_cache, engine.no_packed_tails = not prefix_cache, not packed_tails

        def sized(native):
            engine.pool_bytes = self._pool_bytes(native, engine, max_blocks, pool_bytes, budget_bytes)
            return config

        self._service = _Service(model, sized, choice(linear, LINEAR, "linear"))
        self.tokenizer = lib.paged_model_tokenizer(self._service.model)

    @staticmethod
    def _pool_bytes(native, engine, max_blocks, pool_bytes, budget_bytes):
        total = int(pool_bytes)
        if max_blocks is not None:
            facts = ffi.new("paged_model_info *")
            lib.paged_model_get_info(native, facts)
            group = ffi.new("paged_group_config *", {
                "n_layers": facts.n_layers, "n_kv_heads": facts.n_kv_heads, "head_dim_k": facts.head_dim_k,
                "head_dim_v": facts.head_dim_v, "layout": lib.PAGED_LAYOUT_PACKED,
                "type": lib.paged_engine_kv_type(engine.kv_type, ffi.NULL, facts.head_dim_k)})
            total = int(max_blocks) * lib.paged_block_bytes(group, engine.block_size or BLOCK_SIZE)
        budget = memory_bytes() if budget_bytes is None else int(budget_bytes)
        if total < 0:
            raise InvalidArgument(f"a pool of {total} bytes")
        if total > budget:
            blocks = f"max_blocks {max_blocks} need" if max_blocks is not None else "the pool needs"
            raise NoBlocks(f"{blocks} {total} bytes ({total / 1e9:.2f} GB), the budget is {budget} bytes ({budget / 1e9:.2f} GB)")
        return total

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Cancels what runs and frees everything. A second time does nothing; a call after that is Stale."""
        self._service.close()

    # ---- text and tokens ----

    def tokenize(self, text: str, special: bool = True, control: bool = False) -> np.ndarray:
        """Text to token ids, int32. special: BOS and EOS where the model says so; control: "<|im_end|>" is its token, not
        characters."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        tokens, n, error = np.empty(len(data) + 8, np.int32), ffi.new("int32_t *"), new_error()
        flags = (lib.PAGED_TOKENIZE_SPECIAL if special else 0) | (lib.PAGED_TOKENIZE_CONTROL if control else 0)
        with self._service.calling():
            check(lib.paged_tokenize(self.tokenizer, data, len(data), flags, pointer("int32_t *", tokens), len(tokens), n, error),
                  error)
        return tokens[:n[0]].copy()

    def detokenize(self, tokens: ArrayLike, control: bool = False) -> str:
        """Token ids to text; control: control tokens appear in it."""
        tokens = integers(tokens, "tokens", np.int32)
        detok, out, text = ffi.new("paged_detok *"), ffi.new("char[]", lib.PAGED_DETOK_MAX), []
        with self._service.calling():
            lib.paged_detok_init(detok, self.tokenizer, control)
            for token in tokens:
                text.append(ffi.buffer(out, lib.paged_detok_push(detok, token, out))[:])
            text.append(ffi.buffer(out, lib.paged_detok_finish(detok, out))[:])
        return b"".join(text).decode()

    def chat_tokens(self, messages: Iterable[Mapping[str, str]], add_generation_prompt: bool = True) -> np.ndarray:
        """The model's chat template over [{"role": …, "content": …}, …], as token ids. Unsupported: a template that is not
        known."""
        keep = [(str(m["role"]).encode(), str(m["content"]).encode()) for m in messages]
        for role, content in keep:
            if b"\0" in role + content:
                raise InvalidArgument("a message has a character 0")
        held = [(ffi.new("char[]", role), ffi.new("char[]", content)) for role, content in keep]
        native = ffi.new("paged_message[]", held)
        capacity = sum(len(role) + len(content) + 64 for role, content in keep) + 4096
        tokens, n, error = np.empty(capacity, np.int32), ffi.new("int32_t *"), new_error()
        with self._service.calling():
            check(lib.paged_chat_tokenize(self._service.model, native, len(keep), add_generation_prompt,
                                          pointer("int32_t *", tokens), capacity, n, ffi.NULL, 0, error), error)
        return tokens[:n[0]].copy()

    # ---- requests ----

    def generate(self, prompts: Any, **options: Any) -> Any:
        """Answers to one prompt or to a list of them, which run together: a Completion, or a list of them. With n > 1 each prompt
        has a list of n.

        A prompt is text or token ids. Options, with what they are without: max_tokens (until the end of the context), temperature
        (0: greedy), top_k, top_p, min_p (off), seed (0), stop (strings), stop_tokens, ignore_eos, min_tokens, repetition_penalty,
        presence_penalty, frequency_penalty, logit_bias ({token: bias}), logprobs (False; True, or how many of the best at each
        place), n (1), salt, priority, deadline_ms, control_text; see paged_request in engine.h.

        Errors: TooLong, InvalidArgument, NoMemory; what had begun is cancelled.
        """
        single = isinstance(prompts, (str, bytes)) or _is_tokens(prompts)
        prompts = [prompts] if single else list(prompts)
        requests = [self._request(prompt, options) for prompt in prompts]
        streams, answers = collections.deque(), []
        for request in requests:
            streams.append(self._submit_when_possible(request, streams, answers))
        while streams:
            answers.append(self._finish(streams.popleft()))
        return answers[0] if single else answers

    def _submit_when_possible(self, request, streams, answers):
        while True:
            try:
                return self._submit(request)
            except Limit:
                # The queue is full of ours, or of somebody else's.
                if not streams:
                    raise
                answers.append(self._finish(streams.popleft()))

    @staticmethod
    def _finish(choices):
        done = [stream.result() for stream in choices]
        return done if len(done) > 1 else done[0]

    def stream(self, prompt: Any, **options: Any) -> Stream:
        """A Stream of the answer's text as it comes. Options as generate(); n is 1."""
        if options.get("n", 1) != 1:
            raise InvalidArgument(f"a stream is of one answer, not of {options['n']}")
        return self._submit(self._request(prompt, options))[0]

    def chat(self, messages: Iterable[Mapping[str, str]], *, stream: bool = False, **options: Any) -> Completion | Stream:
        """The assistant's next message: a Completion, or with stream=True a Stream. Options as generate()."""
        tokens = self.chat_tokens(messages)
        return self.stream(tokens, **options) if stream else self.generate(tokens, **options)

    def conversation(self, system: str | None = None) -> Conversation:
        """A Conversation with this model."""
        return Conversation(self, system)

    def _request(self, prompt, options):
        """paged_request and what keeps its pointers alive."""
        tokens = integers(prompt, "prompt", np.int32) if _is_tokens(prompt) else self.tokenize(prompt)
        request, keep = ffi.new("paged_request *"), [tokens]
        lib.paged_request_init(request)
        request.tokens, request.n_tokens = pointer("int32_t *", tokens), len(tokens)
        options = dict(options)
        for name, kind in NUMBERS.items():
            value = options.pop(name, None)
            if value is not None:
                try:
                    setattr(request, name, kind(value))
                except (OverflowError, TypeError, ValueError) as wrong:
                    raise InvalidArgument(f"{name} is {value!r}") from wrong
        request.n = int32(options.pop("n", 1), "n")
        salt = options.pop("salt", None)
        if salt is not None:
            keep.append(_c_string(salt, "salt"))
            request.salt = keep[-1]
        stops = options.pop("stop", None) or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        keep.append([_c_string(text, "stop") for text in stops])
        keep.append(ffi.new("char *[]", keep[-1]))
        request.stop, request.n_stop = keep[-1], len(stops)
        stop_tokens = integers(options.pop("stop_tokens", ()), "stop_tokens", np.int32)
        keep.append(stop_tokens)
        request.stop_tokens, request.n_stop_tokens = pointer("int32_t *", stop_tokens), len(stop_tokens)
        bias = options.pop("logit_bias", None) or {}
        keep.append(ffi.new("paged_logit_bias[]", [(int32(token, "logit_bias"), value) for token, value in bias.items()]))
        request.logit_bias, request.n_logit_bias = keep[-1], len(bias)
        logprobs = options.pop("logprobs", False)
        request.logprobs = logprobs is not False
        request.n_top_logprobs = 0 if logprobs is True else int32(logprobs, "logprobs")
        if options:
            raise InvalidArgument(f"there is no option {', '.join(sorted(options))}")
        return request, keep, stops

    def _submit(self, request):
        native, _, stops = request
        out, error = ffi.new("uint64_t *"), new_error()
        with self._service.calling() as service:
            check(lib.paged_service_submit(service, native, out, error), error)
        return [Stream(self._service, out[0] + i, stops, native.n_top_logprobs) for i in range(max(1, native.n))]

    # ---- facts ----

    def _ask(self, function, kind):
        """A function (engine, out) of engine.h, called between two steps."""
        out = ffi.new(f"{kind} *")
        with self._service.calling() as service:
            lib.paged_service_call(service, _callback(function), out)
            return _as_dict(out, kind)

    @property
    def info(self) -> dict[str, Any]:
        """Facts as a dict: n_ctx, block_size, kv_type ("bf16"), pool_bytes, kv_bytes_per_token, attn_kernels, linear_kernels,
        deterministic … (engine.h)."""
        facts = self._ask("paged_engine_get_info", "paged_engine_info")
        return facts | {"kv_type": arrays.TYPE_NAMES[facts["kv_type"]]}

    def stats(self) -> dict[str, Any]:
        """Counters of requests and steps as a dict, and those of the cache under "cache"."""
        return {**self._ask("paged_engine_get_stats", "paged_engine_stats"),
                "cache": self._ask("paged_engine_get_cache_stats", "paged_cache_stats")}

    def check(self) -> None:
        """Walks every invariant of the cache; Corrupt names the first one that does not hold."""
        error = new_error()
        with self._service.calling() as service:
            lib.paged_service_call(service, _callback("paged_engine_check"), error)
        check(error.status, error)


def _callback(function):
    """A function (engine, out) of engine.h as paged_service_call takes it, so that no Python runs between two steps."""
    return ffi.cast("void (*)(paged_engine *, void *)", ffi.addressof(lib, function))


def _is_tokens(prompt):
    """Whether it is one list of ids and not a list of prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    return isinstance(prompt, (list, tuple)) and all(isinstance(t, (int, np.integer)) for t in prompt)


def _c_string(text, name):
    data = text.encode()
    if b"\0" in data:
        raise InvalidArgument(f"{name} has a character 0")
    return ffi.new("char[]", data)


def _as_dict(out, kind):
    values = {}
    for name, field in ffi.typeof(kind).fields:
        value = getattr(out, name)
        if field.type.kind == "array":
            value = ffi.string(value).decode() if field.type.item.cname == "char" else list(value)
        elif field.type.kind == "pointer":
            value = ffi.string(value).decode() if value != ffi.NULL else None
        values[name] = value
    return values


class Stream:
    """An answer as it comes: iterate over pieces of text, whole UTF-8 characters each; result() waits for all of it. `tokens` are
    those that have come. close(), or the end of a `with`, cancels; so does dropping it."""

    def __init__(self, service, number, stops, n_top):
        self._service, self._id, self._stops, self._n_top = service, number, stops, n_top
        self._lock = threading.Lock()
        self._text, self.tokens, self._logprobs, self._top = [], [], [], []
        self._has_logprobs = False
        self._result = None

    def __iter__(self) -> Stream:
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __next__(self) -> str:
        with self._lock:
            while self._result is None:
                piece = self._read()
                if piece:
                    return piece
        raise StopIteration

    def _read(self):
        """What is new, or "" after WAIT_MS."""
        out = ffi.new("paged_output *")
        with self._service.calling() as service:
            check(lib.paged_service_read(service, self._id, WAIT_MS, out), None, f"request {self._id}")
            text = ffi.buffer(out.text, out.text_len)[:].decode() if out.text_len else ""
            self._text.append(text)
            self.tokens += ffi.unpack(out.tokens, out.n_tokens) if out.n_tokens else []
            if out.logprobs != ffi.NULL:
                self._has_logprobs = True
                self._logprobs += ffi.unpack(out.logprobs, out.n_tokens)
            if out.top_logprobs != ffi.NULL:
                self._top += [[(each.token, each.logprob) for each in out.top_logprobs[i * self._n_top:(i + 1) * self._n_top]]
                              for i in range(out.n_tokens)]
            if out.finish != lib.PAGED_FINISH_NONE:
                self._end(out)
                lib.paged_service_release(service, self._id)
        return text

    def _end(self, out):
        finish = ffi.string(lib.paged_finish_name(out.finish)).decode()
        self._result = Completion(
            "".join(self._text), self.tokens, finish, out.prompt_tokens, out.cached_tokens,
            self._logprobs if self._has_logprobs else None, self._top if self._n_top else None,
            self._stops[out.stop_string] if out.stop_string >= 0 else None, out.stop_token if out.stop_token >= 0 else None,
            out.n_preemptions, out.queue_ms, out.prefill_ms, out.decode_ms)
        self._error = out.error

    @property
    def finish(self) -> str | None:
        """Why it ended; None: it has not."""
        return self._result.finish if self._result else None

    def result(self) -> Completion:
        """The whole answer, when it has ended. An error of the engine is raised."""
        with self._lock:
            while self._result is None:
                self._read()
        if self._result.finish == "error":
            check(self._error, None, "the request ended with an error")
        return self._result

    def cancel(self) -> None:
        """Ends it at the next step; what has come can still be read. From any thread."""
        with self._service.calling() as service:
            lib.paged_service_cancel(service, self._id)

    def close(self) -> None:
        """Cancels it and forgets the rest."""
        with self._lock:
            if self._result is None:
                self._result = Completion("".join(self._text), self.tokens, "cancelled", 0, 0)
                with self._service.calling() as service:
                    lib.paged_service_release(service, self._id)

    def __del__(self):
        if getattr(self, "_result", True) is None:
            self._service.drop(self._id)


class Conversation:
    """Turns with a model. What was said stays in the engine's cache, so that a turn computes what is new only
    (`cached_tokens`)."""

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages = [{"role": "system", "content": system}] if system is not None else []

    def say(self, text: str, **options: Any) -> Completion:
        """The answer to the next message of the user, a Completion. Options as LLM.generate(). An error leaves the messages as
        they were."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self.llm.chat(asked, **options)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer
