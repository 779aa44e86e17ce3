"""Rows about one process: scheduler, engine overhead, sampling, the CPU path; split or not."""

from __future__ import annotations

import contextlib
from functools import partial

from tools.performance.rows import Area, Found, Json, Row, Source, at, judge, number, ratio, value

MOST_OUTSIDE = 0.10
LEAST_BANDWIDTH = 0.70
SHORT_CONTEXT = 2048
LEAST_LONG_BANDWIDTH = 0.80
LEAST_PROMPT = 0.85
HOLDS_ATTENTION_BACK = (
    "keys and values of 16 tokens lie in pieces of 4 KiB: a loop that does nothing but read such"
    " pieces in any order reaches 0.75 of reading in a row. Those of float8 are of 2 KiB."
)
MOST_LOAD_SECONDS = 1.5
MOST_LOAD_SHARE = 1.15
MOST_CHANGED_PER_MILLION = 10.0


# ---------------------------------------------------------------- scheduler and step


def _step(subject: str, case: str = "nobody waits") -> tuple[str, ...]:
    return ("steps", case, subject, "step_us", "median")


SCHEDULER = Source(
    name="scheduler",
    command="benchmarks/scheduler.py",
    intro="Schedule and update of a step, 256 requests decoding.",
    rows=(
        Row(
            what="a step",
            target="<= 1,000 us",
            measure=value(*_step("baton"), form="{:.0f} us", most=1000.0),
        ),
        Row(
            what="a step with 10,000 waiting / with none",
            target="<= 1.1",
            measure=ratio(
                _step("baton", "10,000 wait"),
                _step("baton"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
                most=1.1,
            ),
        ),
        Row(
            what="a step / nano-vllm's",
            target="<= 1",
            measure=ratio(
                _step("baton"),
                _step("nano-vllm"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
                most=1.0,
            ),
            holds_back="an output record per token, which nano-vllm does not make; that was put"
            " together from public copies, see the log.",
            unmeasured="needs `--nano-vllm PATH`; 1.15 in the log, which is missed.",
        ),
        Row(
            what="a step / a minimal scheduler's without prefix cache, priorities and remote KV",
            measure=ratio(
                _step("baton"),
                _step("minimal (baseline)"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
            ),
        ),
        Row(
            what="block pool, allocate and release: blocks per second / a bare deque's",
            measure=ratio(
                ("block_pool_thousand_blocks_per_s", "allocate + release", "baton", "median"),
                ("block_pool_thousand_blocks_per_s", "allocate + release", "minimal", "median"),
                form="{ratio:.2f}",
            ),
        ),
    ),
)


def _outside(sampling: str, batch: int) -> Row:
    """Judge the fastest tenth of the steps: a busy machine flatters the rest."""
    limit = MOST_OUTSIDE if batch == 32 else None

    def measure(document: Json) -> Found:
        row = at(document, "decode", f"{sampling}, batch {batch}")
        share = number(row, "share_outside_in_fastest_tenth")
        return Found(f"{100 * share:.1f} %", judge(share, None, limit, None))

    return Row(
        what=f"{sampling}, batch {batch}",
        target=f"<= {100 * limit:g} %" if limit else "",
        measure=measure,
        holds_back="many small array operations, which cost as much for small models as large.",
    )


OVERHEAD = Source(
    name="engine_overhead",
    command="benchmarks/engine_overhead.py",
    intro="Share of a decode step that is not the model (schedule, batch, plan, sampling, update),"
    " in the fastest tenth of the steps.",
    rows=tuple(
        _outside(sampling, batch)
        for batch in (1, 8, 32)
        for sampling in ("greedy", "random", "top-k, top-p")
    ),
)


def _host(what: str, target: float | None, *path: str, holds_back: str = "") -> Row:
    def measure(document: Json) -> Found:
        found = number(document, "now", *path)
        text = f"{found:g}"
        with contextlib.suppress(KeyError):  # a part that came with the revision
            text += f" (before: {number(document, 'before', *path):g})"
        return Found(text, judge(found, None, target, None))

    return Row(
        what=what,
        target="" if target is None else f"<= {target:g}",
        measure=measure,
        holds_back=holds_back,
    )


HOST = Source(
    name="host_overhead",
    command="benchmarks/host_overhead.py",
    absent="It is to be measured where nothing else runs.",
    intro="The host's part of steps on a GPU, over a driver that only counts: Python and Triton's"
    " launch code are real, products of matrices and the device are not there. CPU time, the"
    " least of the rounds' medians.",
    rows=(
        _host(
            "launches of an eager layer (prompt chunk), us of host", 45,
            "eager layer us", "prompt chunk of 128", "launches", "median",
            holds_back="Each op still makes its results and looks at shapes in Python.",
        ),
        _host(
            "an eager layer (prompt chunk) with its modules, us of host", None,
            "eager layer us", "prompt chunk of 128", "whole", "median",
        ),
        _host(
            "the model runner in a decode step of 256 requests, us of host", 400,
            "decode step us", "batch 256", "runner", "median",
            holds_back="Python that looks at each request once.",
        ),
        _host(
            "a layer of a prompt chunk that is replayed, with its share of the step, us of host",
            None, "eager layer us", "the prompt's step, replayed", "median",
        ),
        _host(
            "share of time that the device waits, another thread computing in bursts of 2 ms", None,
            "idle share", "switch interval 5 ms", "bursts of 2 ms",
        ),
        _host(
            "a whole decode step of 256 requests, us of host", None,
            "decode step us", "batch 256", "whole", "median",
        ),
        _host("graph nodes per layer", 9, "graph nodes", "per layer"),
    ),
)  # fmt: skip


def _changed(case: str, *, has_target: bool) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "results", case)
        draws, changed = number(row, "draws"), number(row, "changed")
        rate = changed / draws * 1e6
        most = MOST_CHANGED_PER_MILLION if has_target else None
        return Found(
            f"{rate:.1f} per million ({changed:.0f} of {draws:,.0f})", judge(rate, None, most, None)
        )

    return Row(
        what=case,
        target=f"<= {MOST_CHANGED_PER_MILLION:g} per million" if has_target else "",
        measure=measure,
    )


STABILITY = Source(
    name="sampling_stability",
    command="benchmarks/sampling_stability.py",
    intro="Draws that another rounding of the logits changes.",
    rows=(
        _changed("demo model, Gumbel-max", has_target=True),
        _changed("demo model, inverse transform", has_target=False),
        _changed("flat, 4096 tokens, Gumbel-max", has_target=True),
        _changed("flat, 151936 tokens, Gumbel-max", has_target=True),
        _changed("two schedules, Gumbel-max", has_target=True),
    ),
)


# ---------------------------------------------------------------- the CPU path


_CASES = (
    *("prefill 512", "prefill 2048", "prefill 8192"),
    *("decode 1", "decode 8", "decode 32", "decode 64"),
)


def _beside(pair: str, ours: str, case: str, least: float) -> Row:
    """Our weights against the best of those peers' that the benchmark compares them with."""

    def measure(document: Json) -> Found:
        found = number(document, "ratio_to_best_peer", pair, case)
        rate = number(document, "tokens_per_second", f"baton {ours}".strip(), case)
        return Found(f"{found:.2f} ({rate:.1f} tok/s)", judge(found, least, None, None))

    return Row(
        what=f"{case}, {pair}: over the best peer's",
        target=f">= {least:g}",
        measure=measure,
        holds_back="see the log.",
    )


def _all_beside(
    pair: str,
    ours: str,
    prefill: float | None,
    decode: float | None,
    decode_1: float | None = None,
) -> list[Row]:
    goals = {case: prefill if case.startswith("prefill") else decode for case in _CASES}
    goals["decode 1"] = decode_1 or decode
    return [_beside(pair, ours, case, least) for case, least in goals.items() if least is not None]


def _share(weights: str, dtype: str, case: str, least: float) -> Row:
    """Return the row of a case's share of what memory bandwidth or a large product allows."""
    ours = f"baton {weights}".strip()
    of = "read bandwidth" if case == "decode 1" else f"the rate of a large product in {dtype}"
    return Row(
        what=f"{case}, {weights or dtype}: share of {of}",
        target=f">= {least:g}",
        measure=value("share_of_limit", ours, case, least=least),
        holds_back="see the log.",
    )


def _all_shares(weights: str, dtype: str, prefill: float) -> list[Row]:
    cases = [case for case in _CASES if case.startswith("prefill")]
    return [
        *(_share(weights, dtype, case, prefill) for case in cases),
        _share(weights, dtype, "decode 1", 0.85),
    ]


def _of_125m(kind: str) -> Source:
    return Source(
        name=f"engine_cpu_{kind}",
        command="benchmarks/engine_cpu.py --peers all",
        intro=f"A Qwen3 shape of 125 million random weights in float32, two threads, {kind}.",
        rows=(
            *_all_beside("float32", "", 1.02, 1.1, decode_1=1.0),
            *_all_shares("", "float32", 0.82),
        ),
    )


def _of_06b(kind: str) -> Source:
    return Source(
        name=f"engine_cpu_0.6b_{kind}",
        command="benchmarks/engine_cpu.py --shape 0.6B --peers all",
        intro="Qwen3-0.6B's shape, random weights in bfloat16, or in what an engine makes of them,"
        f" two threads, {kind}; GGUF's types in one file for both engines. ONNX Runtime GenAI takes"
        " no batch of 64.",
        rows=(
            *_all_beside("bf16", "bf16", 1.02, 1.1),
            *_all_beside("int8 beside int8", "int8", 1.4, None),
            *_all_beside("int8 beside any", "int8", None, 1.1),
            *_all_beside("int4 beside any", "int4", None, 1.1),
            *_all_beside("q8_0, one file", "q8_0", 1.3, 1.3),
            *_all_beside("q4_0, one file", "q4_0", 1.3, 1.3),
            *_all_beside("q4_k, one file", "q4_k", 1.3, 1.3),
            *_all_shares("bf16", "bfloat16", 0.8),
        ),
    )


# What each kind of CPU was measured on, the instruction sets that kernels are built for.
ENGINE_CPU = (
    _of_125m("x86-64-v4-bf16"),
    _of_125m("x86-64-v3"),
    _of_06b("x86-64-v4-amx"),
    _of_06b("x86-64-v4-bf16"),
    _of_06b("x86-64-v3"),
)


def _load(weights: str) -> tuple[Row, Row]:
    def place(name: str) -> tuple[str, ...]:
        return ("weights", weights, "this", name)

    return (
        Row(
            what=f"seconds to load, `--weights {weights}`",
            target=f"<= {MOST_LOAD_SECONDS:g}",
            measure=value(*place("seconds"), form="{:.1f} s", most=MOST_LOAD_SECONDS),
            holds_back="pages that nobody has written yet come at 1 GB/s in this virtual machine,"
            " and other work took more than half of its two cores.",
        ),
        Row(
            what=f"memory at its peak / of the weights, `--weights {weights}`",
            target=f"<= {MOST_LOAD_SHARE:g}",
            measure=value(*place("share"), form="{:.2f}", most=MOST_LOAD_SHARE),
        ),
    )


MODEL_LOAD = Source(
    name="model_load",
    command="benchmarks/model_load.py --other CHECKOUT",
    intro="Loading a bfloat16 checkpoint of Qwen3-0.6B's shape, in a fresh process each time.",
    rows=(*_load("auto"), *_load("int8"), *_load("int4"), *_load("fp32")),
)


def _one_of(rows: Json, **wanted: str | int) -> Json:
    """The one row that has these values."""
    for row in rows:
        if all(at(row, key) == value for key, value in wanted.items()):
            return row
    raise LookupError(f"no row for {wanted}")


def _attention(dtype: str, heads: str, context: int, batch: int, cache: str = "") -> Row:
    least = LEAST_LONG_BANDWIDTH if context > SHORT_CONTEXT else LEAST_BANDWIDTH
    wanted = {"dtype": dtype, "heads": heads, "context": context, "batch": batch}

    def measure(document: Json) -> Found:
        row = _one_of(at(document, "attention"), cache=cache or dtype, **wanted)
        share, times = number(row, "share_of_bandwidth"), number(row, "times_torch")
        text = f"{share:.2f}; {times:.1f} times as fast as plain torch"
        return Found(text, judge(share, least, None, None))

    of_cache = f", a cache of {cache.partition('_')[0]}" if cache else ""
    return Row(
        what=f"paged decode attention, {dtype}{of_cache}, context {context:,}, heads {heads},"
        f" batch {batch}: share of memory bandwidth",
        target=f">= {least}",
        measure=measure,
        holds_back=HOLDS_ATTENTION_BACK,
    )


def _prompt(dtype: str, tokens: int) -> Row:
    def measure(document: Json) -> Found:
        row = _one_of(at(document, "prompt_attention"), dtype=dtype, tokens=tokens)
        share = number(row, "share_of_linear")
        return Found(f"{share:.2f}", judge(share, LEAST_PROMPT, None, None))

    return Row(
        what=f"attention of a prompt of {tokens:,} tokens, {dtype}: rate of its products / of those"
        " of linear layers",
        target=f">= {LEAST_PROMPT}",
        measure=measure,
        holds_back="weights of a softmax, and packing keys and values for every 384 rows.",
    )


def _latents(dtype: str, heads: int, batch: int) -> Row:
    def measure(document: Json) -> Found:
        row = _one_of(at(document, "latent_attention"), dtype=dtype, heads=heads, batch=batch)
        share, limit = number(row, "share_of_bandwidth"), number(row, "share_of_limit")
        text = f"{share:.2f}; {limit:.2f} of the limit that products or reading set"
        return Found(text, share >= LEAST_BANDWIDTH)

    return Row(
        what=f"paged decode attention over latents (512 + 64), context 4,096, {dtype}, {heads}"
        f" heads, batch {batch}: share of memory bandwidth",
        target=f">= {LEAST_BANDWIDTH}",
        measure=measure,
        holds_back="each number read is multiplied for every head, twice: 128 heads wait for"
        " products. The limit is the longer of reading and a large product by torch.",
    )


def _linear(storage: str, rows: int) -> Row:
    def measure(document: Json) -> Found:
        found = [
            number(row, f"{storage}_times")
            for row in at(document, "linear")
            if at(row, "rows") == rows
        ]
        if not found:
            raise LookupError(f"no linear layer with {rows} rows")
        return Found(" / ".join(f"{times:.2f}" for times in found))

    return Row(
        what=f"packed {storage} linear layer, {rows} rows: times as fast as F.linear, by shape",
        measure=measure,
    )


KERNELS_CPU = Source(
    name="kernels_cpu",
    command="benchmarks/kernels.py",
    rows=(
        *(
            _attention("float32", heads, SHORT_CONTEXT, batch)
            for heads in ("8/2 x 64", "8/4 x 128")
            for batch in (8, 32)
        ),
        *(
            _attention("bfloat16", "16/8 x 128", context, batch, cache)
            for cache in ("", "float8_e4m3fn")
            for context, batch in ((4096, 8), (16384, 2))
        ),
        *(
            _prompt(dtype, tokens)
            for dtype in ("float32", "bfloat16")
            for tokens in (4096, 8192, 16384)
        ),
        *(
            _latents(dtype, heads, batch)
            for dtype in ("float32", "bfloat16")
            for heads in (16, 128)
            for batch in (1, 8)
        ),
        *(_linear(storage, rows) for rows in (1, 8, 32, 512) for storage in ("fp32", "int8")),
    ),
)


# ---------------------------------------------------------------- families


LEAST_OVER_DENSE = 0.8


def _over_dense(family: str, case: str) -> Row:
    return Row(
        what=f"{family}, {case}: tokens per second / a dense model's of the same active weights",
        target=f">= {LEAST_OVER_DENSE:g}",
        measure=value("ratios", f"{family} over dense", case, least=LEAST_OVER_DENSE),
        holds_back="at batch 8 a step reads most experts, and the dense model as much as at 1.",
    )


def _families_over(peer: str, document: Json) -> Found:
    ratios = {
        (family.removesuffix(f" over {peer}"), case): number(cases, case)
        for family, cases in at(document, "ratios").items()
        if family.endswith(f" over {peer}")
        for case in cases
    }
    worst = min(ratios, key=lambda row: ratios[row])
    num_slower = sum(ratio <= 1 for ratio in ratios.values())
    text = (
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}, worst: {', '.join(worst)};"
        f" {len(ratios) - num_slower} of {len(ratios)} faster"
    )
    return Found(text, not num_slower)


def _long_attention(family: str) -> Row:
    return Row(
        what=f"{family}, float32, 12 heads: share of memory bandwidth of what 4,096 tokens add to a"
        " step",
        target=f">= {LEAST_BANDWIDTH}",
        measure=value(
            *("attention", family, "share_of_bandwidth"), form="{:.2f}", least=LEAST_BANDWIDTH
        ),
        holds_back="see the kernels by themselves below.",
    )


FAMILIES = Source(
    name="families",
    command="benchmarks/families.py",
    intro="Families of models, float32, random weights, beside `transformers` and llama.cpp in one"
    " run, each with the same checkpoint.",
    rows=(
        *(
            Row(
                what=f"every family and case: tokens per second / {name}",
                target="> 1",
                measure=partial(_families_over, peer),
                holds_back="see the log.",
            )
            for peer, name in (("transformers", "`transformers`'"), ("llamacpp", "llama.cpp's"))
        ),
        *(
            _over_dense(family, case)
            for family in ("Qwen3-MoE", "Mixtral")
            for case in ("decode 1", "decode 8")
        ),
        *(_long_attention(family) for family in ("Qwen3", "DeepSeek-V2")),
    ),
)


# ---------------------------------------------------------------- split or not


def _shown(metric: str, name: str, unit: str, *, has_target: bool = False) -> Row:
    """Judge a metric by the interval of the differences, which must not have 0 in it."""
    scale = 1e3 if unit == "ms" else 1.0

    def measure(document: Json) -> Found:
        verdict = at(document, "verdict")
        split, colocated = at(verdict, "split"), at(verdict, "colocated")
        means = {
            at(one, "name"): number(one, "metrics", metric, "mean") * scale
            for one in at(document, "deployments")
        }
        found = number(verdict, "ratios", metric)
        difference = at(verdict, "differences", metric)
        low, high = (number(difference, end) * scale for end in ("low", "high"))
        text = f"{found:.2f} ({means[split]:,.2f} / {means[colocated]:,.2f} {unit};"
        text += f" difference {low:+,.2f} to {high:+,.2f})"
        if metric == "goodput_per_s" and "format" not in document:
            text += ", **by the old definition**: what ended in the window, whenever it was sent"
        return Found(text, high < 0 if has_target else None)

    return Row(
        what=f"{name}: best split / best colocated",
        target="< 1, and all of the interval below 0" if has_target else "",
        measure=measure,
        holds_back="not shown. Router, load generator and nodes share two cores: part of the tail"
        " is how long a process waits for one, whether its node computes prompts or not.",
    )


def _verdict(document: Json) -> Found:
    verdict = at(document, "verdict")
    words = (at(verdict, name) for name in ("answer", "split", "colocated"))
    return Found("{}: {} against {}".format(*words))


def _kept_up(document: Json) -> Found:
    code = number(document, "exit_code")
    return Found("yes" if code == 0 else f"no (exit code {code:g})", code == 0)


COMPARE = Source(
    name="compare",
    command="benchmarks/split_or_not.py",
    intro="Long prompts on the demo model, the same requests and cores for each shape; differences"
    " are 95 % intervals.",
    rows=(
        _shown("itl_p99_s", "ITL p99", "ms", has_target=True),
        _shown("ttft_p50_s", "TTFT p50", "ms"),
        _shown("ttft_p99_s", "TTFT p99", "ms"),
        _shown("goodput_per_s", "goodput", "requests/s"),
        Row(what="verdict by goodput", measure=_verdict),
        Row(
            what="the load generator kept up",
            target="yes",
            measure=_kept_up,
            holds_back="it shares the cores with all else; its lag is in these latencies.",
        ),
    ),
)


# ---------------------------------------------------------------- the load generator


def _generator(streams: int, *, has_target: bool = False) -> Row:
    def measure(document: Json) -> Found:
        [run] = [one for one in at(document, "runs") if at(one, "streams") == streams]
        lag = number(run, "loop_lag_ms", "p99")
        text = (
            f"{lag:.1f} ms (median {number(run, 'loop_lag_ms', 'p50'):.1f} ms) at"
            f" {number(run, 'output_tokens_per_s'):,.0f} tokens/s, {number(run, 'core_share'):.0%}"
            f" of a core; {number(run, 'num_miscounted'):.0f} requests miscounted"
        )
        return Found(text, lag < 5 if has_target else None)

    return Row(
        what=f"lag p99 of the generator's loop, {streams:,} streams",
        target="< 5 ms" if has_target else "",
        measure=measure,
        holds_back="its core makes the frames of all streams that a decode step answers at once;"
        " the router and the simulated nodes have the other one.",
    )


LOAD_GENERATOR = Source(
    name="load_generator",
    command="benchmarks/load_generator.py --save",
    intro="A router and simulated nodes on one core, the generator on the other.",
    rows=(_generator(500), _generator(1000), _generator(2000, has_target=True)),
)


def _divergence(model: str, kind: str) -> Row:
    def measure(document: Json) -> Found:
        found = at(document, "files", f"{model} {kind}")
        ours, theirs = (number(found, engine, "kl") for engine in ("baton", "llamacpp"))
        same = (number(found, engine, "same_likeliest_token") for engine in ("baton", "llamacpp"))
        shares = ", ".join(f"{share:.1%}" for share in same)
        text = f"{ours / theirs:.2f} ({ours:.2g} / {theirs:.2g}; same token {shares})"
        return Found(text, ours <= theirs)

    return Row(
        what=f"{model}, {kind}: KL to float32 / llama.cpp's",
        target="<= 1",
        measure=measure,
        holds_back="see the log.",
    )


DIVERGENCE = Source(
    name="divergence",
    command="benchmarks/divergence.py",
    intro="Divergence of the next token's distribution from float32 with the same file's"
    " dequantized weights: mean KL divergence in nats, and how often the most likely token is the"
    " same. llama.cpp made the files, and scores the same tokens.",
    rows=tuple(
        _divergence(model, kind)
        for model in ("SmolLM2-135M", "demo model")
        for kind in ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
    ),
)


def _of_ranks(
    what: str,
    key: str,
    *,
    least: float | None = None,
    most: float | None = None,
    holds_back: str = "",
) -> Row:
    return Row(
        what=what,
        target=f">= {least:g}" if least is not None else f"<= {most:g}",
        measure=value("ratios", key, form="{:.3f}", least=least, most=most),
        holds_back=holds_back,
    )


_OTHERS = (
    "others used the machine, and ranks wait for the one of them that was interrupted; on a quiet"
    " machine it holds, see the log."
)

PARALLEL = Source(
    name="parallel",
    command="benchmarks/parallel.py",
    intro="Ranks of one machine: sums between two processes; a Qwen3 shape of 125 million random"
    " weights in float32, one thread a rank; hand-overs of the demo model in both orders of a"
    " block, `--kv-layout heads` and `layers`, each against nodes of one rank in the same order.",
    rows=(
        _of_ranks(
            "sums of 8 to 64 KiB in shared memory: time / gloo's, the worst", "sums", most=0.2
        ),
        _of_ranks(
            "TP 2, decode 1: speed / 2 threads",
            "decode TP 2 / 2 threads",
            least=0.9,
            holds_back=_OTHERS,
        ),
        _of_ranks(
            "TP 2, decode 1: speed / 1 thread",
            "decode TP 2 / 1 thread",
            least=1.6,
            holds_back=_OTHERS,
        ),
        _of_ranks(
            "PP 2, a prompt of 12 chunks: / 1 thread",
            "prompt PP 2 / 1 thread",
            least=1.7,
            holds_back="other work on the machine; 1.79 in a quieter run, see the log.",
        ),
        _of_ranks("a rank that waits: share of a core", "idle rank, share of a core", most=0.01),
        *(
            _of_ranks(
                f"hand-over {shape.replace('->', 'to')} by {layout}: time / P1 to D1",
                f"hand-over {shape}, {layout}",
                most=1.15,
            )
            for layout in ("heads", "layers")
            for shape in ("P2 -> D1", "P1 -> D2")
        ),
        *(
            _of_ranks(
                f"ranges per block and pair of unlike ranks, by {layout}",
                f"descriptors per block and pair, {layout}",
                most=1,
                holds_back=why,
            )
            for layout, why in (
                ("heads", ""),
                ("layers", "a pair has two ranges of each layer; by heads it has one."),
            )
        ),
    ),
)

AREAS = (
    Area(
        title="Split or not",
        sources=(COMPARE, LOAD_GENERATOR),
        log=(
            "2026-11-21: colocated against split on two cores that others used too",
            "2026-11-21: how many streams one load generator holds",
        ),
        notes=("What the shapes are, and how the verdict is reached: [loadtest.md](loadtest.md).",),
    ),
    Area(
        title="Scheduler and engine",
        sources=(SCHEDULER, OVERHEAD, HOST, STABILITY),
        log=(
            "2026-11-21: a scheduler step in a third of the time",
            "2026-11-21: rows that stay, and draws without a float64 vocabulary",
            "2026-11-21: top-k and top-p without a sort of the vocabulary",
            "2026-11-21: draws that rounding hardly moves",
            "2026-11-21: what a grammar costs, and what it takes to break its reader",
        ),
    ),
    Area(
        title="On a CPU",
        sources=(*ENGINE_CPU, DIVERGENCE, FAMILIES, PARALLEL, KERNELS_CPU, MODEL_LOAD),
        log=(
            "2026-11-21: paged attention and projections on a CPU",
            "2026-11-28: what rounding of inputs costs beside llama.cpp",
            "2026-11-26: what ranks cost and bring",
            "2026-11-26: families again, and what bounds many heads over latents",
        ),
    ),
)
