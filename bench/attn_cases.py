"""The cases of `./x bench attn` that need nobody but ourselves: against the machine's limits, and one way of ours against another.

Each case is a generator of rows; CASES names them in the order in which they run. Caches are cold (rotated) unless a case says
otherwise; blocks lie in random order, block-major, as the pool has them.
"""

from attn_bench import ELEMENT_BYTES, causal_flops, cold_layers, shape

HEADS, CONTEXT = 32, 8192
MHA, GQA_4, GQA_8 = 32, 8, 4    # KV heads


def paged(spec, kv_type, block=32, **more):
    n_keys = sum(map(int, more["lens"].split(","))) if "lens" in more else None
    return {**spec, "type": kv_type, "block": block, "layers": cold_layers(spec, ELEMENT_BYTES[kv_type], n_keys), "shuffled": 1,
            **more}


def not_built(cache):
    return f"not built: {cache.skip}"


def by_regime(slow, fast):
    return {"slow": slow, "fast": fast}


def group_name(kv_heads):
    return "MHA" if kv_heads == HEADS else f"GQA {HEADS // kv_heads}"


def share_of_memory(cache, name):
    """Bytes of keys and values a second, of what the probe read."""
    return lambda answers: cache.bytes / answers[name]["call_s"] / answers["limit"]


def speed_ratio(one, other):
    return lambda answers: answers[other]["call_s"] / answers[one]["call_s"]


def loss(slower, faster):
    return lambda answers: 1 - answers[faster]["call_s"] / answers[slower]["call_s"]


# ---- decode ----

DECODE_SHARE = {MHA: (by_regime(.95, .88), by_regime(.98, .95)), GQA_4: (.85, .95), GQA_8: (.78, .90)}


def decode(bench, kv_heads):
    """Types of keys and values, and the plain layout, one query of one sequence."""
    case, spec = f"decode {group_name(kv_heads)}", shape(HEADS, kv_heads, CONTEXT)
    types = ["bf16", "f16", "f32", "i8"] if kv_heads != GQA_8 else ["bf16", "i8"]
    specs = {kv_type: paged(spec, kv_type) for kv_type in types}
    with bench.open(**specs, plain=paged(spec, "bf16", layout="plain")) as caches:
        steps = {name: cache.run for name, cache in caches.items() if not cache.skip}
        rounds = bench.rounds(steps, "memory", seconds=55)
        must, aim = DECODE_SHARE[kv_heads]
        yield rounds.row(case, "bf16, share of read bandwidth", "share", share_of_memory(caches["bf16"], "bf16"), must, aim)
        yield rounds.row(case, "bf16", "GB/s", lambda answers: caches["bf16"].bytes / answers["bf16"]["call_s"] / 1e9)
        yield rounds.row(case, "read bandwidth", "GB/s", lambda answers: answers["limit"] / 1e9)
        if "f16" in caches:
            yield rounds.row(case, "f16 / bf16, tokens/s", "ratio", speed_ratio("f16", "bf16"), .90)
            yield rounds.row(case, "f32, share of read bandwidth", "share", share_of_memory(caches["f32"], "f32"), .93)
        if caches["i8"].skip:
            yield bench.skipped(case, "int8 / bf16, tokens/s", "ratio", not_built(caches["i8"]), 1.7, 1.9)
        else:
            yield rounds.row(case, "int8 / bf16, tokens/s", "ratio", speed_ratio("i8", "bf16"), 1.7, 1.9)
            yield rounds.row(case, "int8, share of read bandwidth", "share", share_of_memory(caches["i8"], "i8"))
        yield rounds.row(case, "plain layout / packed, tokens/s", "ratio", speed_ratio("plain", "bf16"))


def small_model(bench):
    """The shape of SmolLM2-135M: 6 KiB of K a block for all heads."""
    spec = shape(9, 3, CONTEXT, dim=64, batch=4)
    with bench.open(bf16=paged(spec, "bf16", block=16), f16=paged(spec, "f16", block=16)) as caches:
        rounds = bench.rounds({name: cache.run for name, cache in caches.items()}, "memory", seconds=15)
        for name, must, aim in (("bf16", .80, .92), ("f16", None, None)):
            yield rounds.row("decode, small model", f"{name}, share of read bandwidth", "share",
                             share_of_memory(caches[name], name), must, aim)


def ragged(bench):
    """16 sequences of 64 … 8192 keys, each longer than the one before by the same factor, and 16 of their mean."""
    n = 16
    lens = [round(64 * 128 ** (i / (n - 1))) for i in range(n)]
    spec = shape(HEADS, GQA_4, max(lens), batch=n)
    even = [sum(lens) // n + (i < sum(lens) % n) for i in range(n)]
    specs = {name: paged(spec, "bf16", lens=",".join(map(str, each))) for name, each in (("ragged", lens), ("even", even))}
    with bench.open(**specs) as caches:
        rounds = bench.rounds({name: cache.run for name, cache in caches.items()}, "memory", seconds=15)
        yield rounds.row("decode, 16 sequences", "64 … 8192 keys / as many each", "ratio", speed_ratio("ragged", "even"), .95)
        yield rounds.row("decode, 16 sequences", "64 … 8192 keys, share of read bandwidth", "share",
                         share_of_memory(caches["ragged"], "ragged"))


# ---- what paging costs ----

HALF_A_PERCENT = {"least": 200}  # rounds that such a claim takes


def paged_or_not(bench, block, must):
    """The same kernel and blocks, in random order in the pool, or each head's as one run of bytes."""
    spec = shape(HEADS, MHA, CONTEXT)
    with bench.open(paged=paged(spec, "bf16", block),
                    run=paged(spec, "bf16", block, shuffled=0, contiguous=1)) as caches:
        rounds = bench.rounds({name: cache.run for name, cache in caches.items()}, "memory", wanted=200, seconds=110)
        yield rounds.row("paged against contiguous", f"loss, K of a head in pieces of {block * 256 >> 10} KiB", "share",
                         loss("paged", "run"), must, better="lower", **HALF_A_PERCENT)


def look_up(bench):
    """The same bytes at the same addresses in the same order, through 512 table entries a head or through 8: what the
    other 504 cost."""
    spec = shape(HEADS, MHA, CONTEXT)
    with bench.open(many=paged(spec, "bf16", 16, shuffled=0, contiguous=1),
                    few=paged(spec, "bf16", 1024, shuffled=0, contiguous=1)) as caches:
        rounds = bench.rounds({name: cache.run for name, cache in caches.items()}, "memory", wanted=200, seconds=110)
        yield rounds.row("block table", "look-ups of blocks of 16, share of attention", "share", loss("many", "few"), .005,
                         better="lower", **HALF_A_PERCENT)


def gather(bench):
    """The way of engines without a paged kernel: copy to one run of bytes, then attend."""
    spec = shape(HEADS, GQA_4, CONTEXT)
    with bench.open(fused=paged(spec, "bf16"), gather=paged(spec, "bf16", gather=1)) as caches:
        if caches["gather"].skip:
            yield bench.skipped("gather, then attend", "paged / gather first, tokens/s", "ratio", not_built(caches["gather"]))
            return
        rounds = bench.rounds({name: cache.run for name, cache in caches.items()}, "memory", seconds=15)
        yield rounds.row("gather, then attend", "paged / gather first, tokens/s", "ratio", speed_ratio("fused", "gather"))


def fixed_order(bench):
    """Our splits sit at multiples of 512 tokens and are merged in order, so that results do not depend on the cut. The
    other side is the same source with splits of 4096: for two threads and 8192 keys the best cut there is."""
    if not bench.free_program.exists():
        yield bench.skipped("fixed order", "cost against the best split", "share", "bench_attn_free is not there", .02,
                            better="lower")
        return
    free = bench.other_side("paged with free splits", [bench.free_program])
    shapes = [("decode MHA", shape(HEADS, MHA, CONTEXT)), ("decode GQA 4", shape(HEADS, GQA_4, CONTEXT)),
              ("decode, one KV head", shape(8, 1, CONTEXT)), ("prefill of 2048", shape(HEADS, GQA_4, 2048, q=2048))]
    for name, spec in shapes:
        cache = paged(spec, "bf16") if spec["q"] == 1 else {**paged(spec, "bf16"), "layers": 1}
        kind = "memory" if spec["q"] == 1 else "bf16"
        with bench.open(ours=cache) as ours, bench.open(free, free=cache) as theirs:
            rounds = bench.rounds({"fixed": ours["ours"].run, "free": theirs["free"].run}, kind, wanted=80, seconds=15)
            yield rounds.row("fixed order", f"{name}, cost against the best split", "share",
                             lambda answers: answers["fixed"]["call_s"] / answers["free"]["call_s"] - 1, .02, better="lower")


def cascade(bench, kv_heads):
    """16 sequences with 4096 tokens in common and 256 of their own. Keys and values that are read are 8.5 times fewer."""
    n, common, own = 16, 4096, 256
    case, spec = f"cascade {group_name(kv_heads)}", shape(HEADS, kv_heads, common + own, batch=n)
    cache = {**paged(spec, "bf16"), "shared": common, "layers": cold_layers(spec, 2, common + n * own)}
    with bench.open(alone=cache, cascade={**cache, "cascade": 1}) as caches:
        name = "16 sequences, 4096 + 256: together / each for itself"
        if caches["cascade"].skip:
            yield bench.skipped(case, name, "ratio", not_built(caches["cascade"]), 5, 7)
            return
        rounds = bench.rounds({name: cache.run for name, cache in caches.items()}, "memory", seconds=25)
        yield rounds.row(case, name, "ratio", speed_ratio("cascade", "alone"), 5, 7)
        yield rounds.row(case, "together, share of read bandwidth", "share", share_of_memory(caches["cascade"], "cascade"))


# ---- prefill ----

def prefill(bench):
    musts = [("q 512", 512, 512, .66, .75), ("q 2048", 2048, 2048, .80, .87), ("512 on 8192", 512, CONTEXT, .82, .88)]
    cases = {f"{group_name(kv_heads)}, {name}": (shape(HEADS, kv_heads, keys, q=q), must, aim)
             for kv_heads in (MHA, GQA_4) for name, q, keys, must, aim in musts}
    yield from share_of_peak(bench, "prefill bf16", "bf16", "bf16", "dot peak", cases)


def prefill_f32(bench):
    cases = {f"{group_name(kv_heads)}, q 2048": (shape(HEADS, kv_heads, 2048, q=2048), .60, .75) for kv_heads in (MHA, GQA_4)}
    yield from share_of_peak(bench, "prefill f32", "f32", "f32", "FMA peak", cases)


def share_of_peak(bench, case, kv_type, kind, of_what, cases):
    """cases: {what: (shape, must, aim)}. All of them in one round; causal operations against those of a loop of products."""
    names = {f"p{i}": what for i, what in enumerate(cases)}
    specs = {name: {**paged(cases[what][0], kv_type), "layers": 1} for name, what in names.items()}
    with bench.open(**specs) as caches:
        if bench.limit(kind) is None:
            yield bench.skipped(case, f"share of {of_what}", "share", "the CPU has no such instruction")
            return
        steps = {name: cache.run for name, cache in caches.items()}
        by_tiles = kv_type == "bf16" and bench.limit("amx") is not None
        if by_tiles:
            steps["amx"] = lambda: bench.ours.ask("peak amx")
        rounds = bench.rounds(steps, kind, wanted=30, seconds=30)
        for name, what in names.items():
            spec, must, aim = cases[what]
            flops = causal_flops(spec)
            yield rounds.row(case, f"{what}, share of {of_what}", "share",
                             lambda answers, n=name, f=flops: f / answers[n]["call_s"] / answers["limit"], must, aim)
            if by_tiles:
                yield rounds.row(case, f"{what}, share of AMX peak", "share", lambda answers, n=name, f=flops:
                                 f / answers[n]["call_s"] / (answers["amx"]["ops"] / answers["amx"]["seconds"]))
            yield rounds.row(case, what, "GFLOP/s", lambda answers, n=name, f=flops: f / answers[n]["call_s"] / 1e9)


# ---- fixed costs ----

def plan(bench):
    spec = {**shape(HEADS, GQA_4, CONTEXT, dim=16, batch=64), "type": "bf16", "block": 16, "shuffled": 1}
    with bench.open(many=spec) as caches:
        rounds = bench.rounds({"plan": lambda: caches["many"].plan(200)}, None, seconds=5, threads=1)
        yield rounds.row("plan", "64 sequences of 8192 keys, blocks of 16", "µs", lambda answers: answers["plan"]["call_s"] * 1e6,
                         5, better="lower")


def call(bench):
    """Hot, barrier included; 256 KiB of keys and values are read in that time too."""
    spec = {**shape(HEADS, GQA_4, 64), "type": "bf16", "block": 32, "shuffled": 1}
    with bench.open(short=spec) as caches:
        rounds = bench.rounds({"call": lambda: caches["short"].run(1000)}, None, seconds=5)
        yield rounds.row("call", "64 keys, one sequence, all of it", "µs", lambda answers: answers["call"]["call_s"] * 1e6, 8,
                         better="lower")


CASES = [
    ("decode MHA", lambda bench: decode(bench, MHA)),
    ("decode GQA 4", lambda bench: decode(bench, GQA_4)),
    ("decode GQA 8", lambda bench: decode(bench, GQA_8)),
    ("decode small model", small_model),
    ("decode ragged", ragged),
    ("paged 8 KiB", lambda bench: paged_or_not(bench, 32, .01)),
    ("paged 32 KiB", lambda bench: paged_or_not(bench, 128, .005)),
    ("block table", look_up),
    ("gather", gather),
    ("fixed order", fixed_order),
    ("cascade MHA", lambda bench: cascade(bench, MHA)),
    ("cascade GQA 4", lambda bench: cascade(bench, GQA_4)),
    ("prefill bf16", prefill),
    ("prefill f32", prefill_f32),
    ("plan", plan),
    ("call", call),
]
