"""The engine from Python gives what the program `paged` gives for the same request, alone and together; streams can be left at
any moment and from any thread; conversations reuse what was computed."""

import gc
import os
import random
import subprocess
import sys
import threading
import time

import pytest

import paged
from conftest import random_seed

if not hasattr(paged, "LLM"):
    pytest.skip("this build has no engine", allow_module_level=True)

PROMPTS = ["The capital of France is", "Once upon a time", "Two plus two is", "Water boils at", "The sky"]


@pytest.fixture(scope="module")
def llm(model):
    with paged.LLM(model, n_ctx=1024, max_running=4, threads=1) as llm:
        yield llm


@pytest.fixture
def program(paged):
    """The program, whose fixture has the name of our module."""
    return paged


def settled(llm):
    """Waits until nothing runs; what was let go ends with the step under way."""
    for _ in range(200):
        stats = llm.stats()
        if stats["n_running"] == stats["n_waiting"] == 0:
            return stats
        time.sleep(0.02)
    raise AssertionError(stats)


def test_the_same_as_the_program(llm, model, program):
    for prompt in PROMPTS[:2]:
        said = program("run", "--model", model, "--prompt", prompt, "--max-tokens", 16, "--raw", "--threads", 1)
        assert said.returncode == 0, said.stderr
        assert llm.generate(prompt, max_tokens=16).text == said.stdout.removesuffix("\n")


def test_together_as_alone(llm):
    alone = [llm.generate(prompt, max_tokens=12, seed=i, temperature=0.8) for i, prompt in enumerate(PROMPTS)]
    streams = [llm.stream(prompt, max_tokens=12, seed=i, temperature=0.8) for i, prompt in enumerate(PROMPTS)]
    assert [stream.result().tokens for stream in streams] == [answer.tokens for answer in alone]
    assert [answer.text for answer in llm.generate(PROMPTS, max_tokens=6)] == [llm.generate(p, max_tokens=6).text
                                                                               for p in PROMPTS]


def test_more_prompts_than_the_queue_holds(model):
    with paged.LLM(model, n_ctx=256, max_running=2, max_waiting=2, threads=1) as llm:
        answers = llm.generate([f"{i}, " for i in range(9)], max_tokens=2)
        assert len(answers) == 9 and all(answer.finish == "length" and len(answer.tokens) == 2 for answer in answers)


def test_a_stream_is_the_answer_in_pieces(llm):
    stream = llm.stream(PROMPTS[1], max_tokens=20)
    assert stream.finish is None
    pieces = list(stream)
    assert len(pieces) > 5 and stream.finish == "length"
    assert "".join(pieces) == stream.result().text == llm.generate(PROMPTS[1], max_tokens=20).text
    assert llm.detokenize(stream.tokens) == stream.result().text


def test_options_reach_the_engine(llm):
    base = llm.generate(PROMPTS[0], max_tokens=8, logprobs=3)
    assert len(base.logprobs) == 8 and all(len(top) == 3 for top in base.top_logprobs)
    # Greedy: the token is the best one, and its log-probability is that of the best.
    assert [top[0][0] for top in base.top_logprobs] == base.tokens
    assert [top[0][1] for top in base.top_logprobs] == base.logprobs
    assert llm.generate(PROMPTS[0], max_tokens=8).logprobs is None
    banned = llm.generate(PROMPTS[0], max_tokens=8, logit_bias={base.tokens[0]: -100})
    assert base.tokens[0] not in banned.tokens
    stopped = llm.generate(PROMPTS[0], max_tokens=8, stop=["Paris", "never"])
    assert stopped.finish == "stop" and stopped.stop_string == "Paris" and "Paris" not in stopped.text
    ended = llm.generate(PROMPTS[0], max_tokens=8, stop_tokens=[base.tokens[2]])
    assert ended.stop_token == base.tokens[2] and ended.tokens == base.tokens[:2]
    both = llm.generate(PROMPTS[0], max_tokens=8, n=2, temperature=1.0, seed=1)
    assert len(both) == 2 and both[0].tokens != both[1].tokens
    assert llm.generate([PROMPTS[0]], max_tokens=1)[0].tokens == llm.generate(llm.tokenize(PROMPTS[0]), max_tokens=1).tokens


def test_reuse_and_salt(llm):
    prompt = "A prompt that is used twice, and has a length. " * 4
    first, second = (llm.generate(prompt, max_tokens=1, salt="a") for _ in range(2))
    assert first.cached_tokens == 0 and second.cached_tokens == second.prompt_tokens - 1
    assert llm.generate(prompt, max_tokens=1, salt="b").cached_tokens == 0


@pytest.mark.parametrize("options, words", [({"max_tokens": "many"}, "max_tokens is 'many'"), ({"top_p": 2.0}, "top_p is 2"),
                                            ({"colour": 1}, "no option colour"),
                                            ({"stop": ["a\0b"]}, "stop has a character 0"), ({"seed": -1}, "seed is -1"),
                                            ({"n": 1000}, "1000"),
                                            ({"stop_tokens": [1.5]}, "not integers"),
                                            ({"temperature": float("nan")}, "temperature")])
def test_mistakes_are_named(llm, options, words):
    with pytest.raises(paged.InvalidArgument, match=words):
        llm.generate("x", **options)


def test_other_errors(llm, tmp_path):
    with pytest.raises(paged.TooLong, match="1024"):
        llm.generate([5] * 2000)
    with pytest.raises(paged.InvalidArgument, match="stream is of one"):
        llm.stream("x", n=2)
    with pytest.raises(paged.InvalidArgument):
        llm.generate([10**6])
    with pytest.raises(paged.ReadWriteError, match="nothing.gguf"):
        paged.LLM(tmp_path / "nothing.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 100)
    with pytest.raises(paged.FormatError):
        paged.LLM(tmp_path / "bad.gguf")


def test_cache_config_of_the_document(model):
    config = {"block_size": 16, "max_blocks": 100000, "enable_paged": True}
    # 30 layers, 3 KV heads of 64, f16: 23040 bytes a token.
    with pytest.raises(paged.NoBlocks, match=r"max_blocks 100000 need 36864000000 bytes .* the budget is 8589934592 bytes"):
        paged.LLM(model, cache_config=config, budget_bytes=8 << 30)
    with pytest.raises(paged.Unsupported, match="enable_paged"):
        paged.LLM(model, cache_config={**config, "enable_paged": False})
    with paged.LLM(model, cache_config={**config, "max_blocks": 32}, threads=1) as llm:
        assert llm.info["n_blocks"] == 32 and llm.info["block_size"] == 16


def test_linear(model):
    """Weights are multiplied as int8 unless bf16 is asked for, which takes AMX."""
    with paged.LLM(model, linear="int8", max_blocks=20) as llm, paged.LLM(model, max_blocks=20) as plain:
        assert llm.info["linear_kernels"] == plain.info["linear_kernels"] and not llm.info["linear_kernels"].startswith("amx_bf16")
        with_amx = plain.info["linear_kernels"].startswith("amx, ")
    if with_amx:
        with paged.LLM(model, linear="bf16", max_blocks=20) as llm:
            assert llm.info["linear_kernels"].startswith("amx_bf16, ") and llm.generate("Two plus two is", max_tokens=2).tokens
    else:
        with pytest.raises(paged.Unsupported, match="asks for a processor with AMX"):
            paged.LLM(model, linear="bf16", max_blocks=20)
    with pytest.raises(ValueError, match="linear"):
        paged.LLM(model, linear="fp4")


def test_kv_type(model):
    """Without a word the type is the one of the engine's rule, and a pool of as many blocks; what is named is taken."""
    facts = [l for l in open("/proc/cpuinfo", encoding="utf-8") if l.startswith("flags")]
    pairs = bool(facts) and " avx512_bf16" in facts[0] and os.environ.get("PAGED_CPU", "amx") in ("amx", "avx512_bf16")
    for kv_type, wanted in ((None, "bf16" if pairs else "f16"), ("auto", "bf16" if pairs else "f16"), ("float16", "f16"),
                            ("f32", "f32"), ("bf16", "bf16"), ("int8", "i8")):
        more = {} if kv_type is None else {"kv_type": kv_type}
        with paged.LLM(model, max_blocks=20, threads=1, **more) as llm:
            assert llm.info["kv_type"] == wanted and llm.info["n_blocks"] == 20
    with pytest.raises(paged.InvalidArgument, match="fp8"):
        paged.LLM(model, kv_type="fp8")


def test_streams_are_left_at_any_moment(llm):
    """By close, by the end of a `with`, by dropping them, also in a cycle; each time the request ends and its blocks come
    back."""
    llm.generate("x", max_tokens=1)
    settled(llm)
    with llm.stream(PROMPTS[1], ignore_eos=True) as stream:
        next(stream)
    assert stream.finish == "cancelled" and list(stream) == []
    dropped = llm.stream(PROMPTS[1], ignore_eos=True)
    next(dropped)
    cycle = [dropped, llm.stream(PROMPTS[2], ignore_eos=True)]
    cycle.append(cycle)
    del dropped, cycle
    gc.collect()
    assert settled(llm)["cache"]["n_used"] == 0
    cancelled = llm.stream(PROMPTS[1], ignore_eos=True)
    threading.Timer(0.1, cancelled.cancel).start()
    assert cancelled.result().finish == "cancelled"
    llm.check()


def test_threads_and_garbage(llm):
    """Four threads ask, read, drop and cancel; the interpreter's collector runs all the while. Answers that are read to their end
    are the ones of a quiet engine."""
    seed = random_seed()
    expected = {prompt: llm.generate(prompt, max_tokens=5).text for prompt in PROMPTS}
    wrong = []

    def work(number):
        rng = random.Random(seed + number)
        try:
            for _ in range(8):
                prompt = rng.choice(PROMPTS)
                stream = llm.stream(prompt, max_tokens=5)
                cycle = [stream]
                cycle.append(cycle)
                what = rng.random()
                if what < 0.6:
                    text = stream.result().text
                    if text != expected[prompt]:
                        wrong.append((prompt, text))
                elif what < 0.8:
                    next(stream, None)
                if rng.random() < 0.3:
                    gc.collect()
        except Exception as failure:
            wrong.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    settled(llm)
    llm.check()


def test_the_gil_is_released_while_it_waits(llm):
    """A second thread, which the interpreter would not switch to by itself, advances while an answer is waited for."""
    seen, stop = [], threading.Event()

    def count():
        while not stop.is_set():
            seen.append(time.monotonic())
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        began = time.monotonic()
        llm.generate(PROMPTS[1], max_tokens=20)
        ended = time.monotonic()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert len([t for t in seen if began < t < ended]) >= 5


def test_close_waits_for_those_inside(model):
    llm = paged.LLM(model, n_ctx=512, threads=1)
    stream, outcome = llm.stream(PROMPTS[1], ignore_eos=True), []

    def read():
        try:
            outcome.append(stream.result())
        except paged.Stale as stale:
            outcome.append(stale)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.1)
    llm.close()
    thread.join()
    assert isinstance(outcome[0], paged.Stale) or outcome[0].finish in ("length", "cancelled")
    llm.close()
    for use in (lambda: llm.generate("x"), llm.stats, lambda: llm.tokenize("x"), lambda: next(stream)):
        with pytest.raises(paged.Stale):
            use()


def test_conversations(llm):
    talk = llm.conversation("You answer in few words.")
    first = talk.say("Name a colour.", max_tokens=8)
    second = talk.say("Another one?", max_tokens=8)
    # All of the first turn was in the cache, but for what the template puts behind an answer.
    assert second.cached_tokens >= first.prompt_tokens + len(first.tokens) - 1
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(paged.InvalidArgument):
        talk.say("x", colour=1)
    assert len(talk.messages) == 5
    assert llm.chat(talk.messages[:2], max_tokens=8).text == first.text
    assert "".join(llm.chat(talk.messages[:2], max_tokens=8, stream=True)) == first.text


def test_conversation_cache_of_the_document(llm):
    """Turns own token ranges of the model's own chat format; what is dropped is gone from the blocks and the rest is exactly a
    conversation that never had it."""
    cache = paged.ConversationCache(max_history_len=200, llm=llm)
    turns = [(f"Question number {i}?", f"Answer number {i}.") for i in range(4)]
    for turn in turns:
        assert cache.add_turn(*turn) == 0
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
    assert cache.messages == messages and cache.n_tokens == len(llm.chat_tokens(messages, False)) == cache.turns[-1].end
    assert [(a.end, b.start) for a, b in zip(cache.turns, cache.turns[1:])] == [(t.end, t.end) for t in cache.turns[:-1]]
    size = cache.cache.block_size
    assert len(cache.used_blocks) == -(-cache.n_tokens // size) == cache.cache.stats()["n_used"]
    assert set().union(*cache.block_table.values()) == cache.used_blocks
    # Its keys and values are in the engine's cache: a reply computes the new turn only.
    answer = cache.reply("Once more?", max_tokens=4)
    assert answer.cached_tokens == len(llm.chat_tokens(messages, False))
    again = cache.clear_old_turns(keep_last_n=2)
    kept = messages[6:] + [{"role": "user", "content": "Once more?"}, {"role": "assistant", "content": answer.text}]
    assert cache.messages == kept and 0 < again < cache.n_tokens
    assert len(cache.used_blocks) == -(-cache.n_tokens // size) == cache.cache.stats()["n_used"]
    fresh = llm.generate(llm.chat_tokens([*kept, {"role": "user", "content": "And?"}]), max_tokens=6, salt="fresh")
    assert cache.reply("And?", max_tokens=6).tokens == fresh.tokens
    # Beyond the limit the oldest go by themselves, and one that is too long alone changes nothing.
    before = list(cache.turns)
    with pytest.raises(paged.TooLong, match="max_history_len is 200"):
        cache.add_turn("word " * 300, "yes")
    assert cache.turns == before
    assert cache.add_turn("word " * 130, "yes") >= 1 and cache.n_tokens <= 200


def test_the_interpreter_ends_in_peace(model):
    """While an answer is computed and another thread waits for it."""
    code = f"""
import paged, threading
llm = paged.LLM({model!r}, n_ctx=512, threads=1)
stream = llm.stream("Once upon a time", ignore_eos=True)
next(stream)
threading.Thread(target=llm.stream("x", ignore_eos=True).result, daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert done.returncode == 0 and "Fatal" not in done.stderr, (done.returncode, done.stderr)
