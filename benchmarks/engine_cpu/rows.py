"""Rows of the page about engines on a CPU, beside those of others."""

from __future__ import annotations

from functools import partial

from benchmarks.page.rows import (
    Found,
    Json,
    Measurement,
    Row,
    Source,
    Subject,
    at,
    judge,
    number,
    value,
)

LEAST_BANDWIDTH = 0.70
MOST_LOAD_SECONDS = 1.5
MOST_LOAD_SHARE = 1.15


_CASES = (
    *("prefill 512", "prefill 2048", "prefill 8192"),
    *("decode 1", "decode 8", "decode 32", "decode 64"),
)


def _beside(pair: str, ours: str, case: str, least: float) -> Row:
    """Return the row that compares our weights with the best peer of the same pair."""

    def measure(document: Json) -> Found:
        found = number(document, "ratio_to_best_peer", pair, case)
        rate = number(document, "tokens_per_second", f"baton {ours}".strip(), case)
        return Found(f"{found:.2f} ({rate:.1f} tok/s)", judge(found, least, None, None))

    return Row(f"{case}, {pair}: over the best peer's", measure, f">= {least:g}", "see the log.")


def _all_beside(
    pair: str, ours: str, prefill: float | None, decode: float | None, decode_1: float | None = None
) -> list[Row]:
    goals = {case: prefill if case.startswith("prefill") else decode for case in _CASES}
    goals["decode 1"] = decode_1 or decode
    return [_beside(pair, ours, case, least) for case, least in goals.items() if least is not None]


def _share(weights: str, dtype: str, case: str, least: float) -> Row:
    """Return the row of a case's share of what memory bandwidth or a large product allows."""
    ours = f"baton {weights}".strip()
    of = "read bandwidth" if case == "decode 1" else f"the rate of a large product in {dtype}"
    return Row(
        f"{case}, {weights or dtype}: share of {of}",
        value("share_of_limit", ours, case, least=least),
        f">= {least:g}",
        "see the log.",
    )


def _all_shares(weights: str, dtype: str, prefill: float) -> list[Row]:
    cases = [case for case in _CASES if case.startswith("prefill")]
    return [
        *(_share(weights, dtype, case, prefill) for case in cases),
        _share(weights, dtype, "decode 1", 0.85),
    ]


def _of_125m(kind: str) -> Source:
    return Source(
        f"engine_cpu_{kind}",
        (*_all_beside("float32", "", 1.02, 1.1, decode_1=1.0), *_all_shares("", "float32", 0.82)),
        f"A Qwen3 shape of 125 million random weights in float32, two threads, {kind}.",
        options="--peers all",
    )


def _of_06b(kind: str) -> Source:
    return Source(
        f"engine_cpu_0.6b_{kind}",
        (
            *_all_beside("bf16", "bf16", 1.02, 1.1),
            *_all_beside("int8 beside int8", "int8", 1.4, None),
            *_all_beside("int8 beside any", "int8", None, 1.1),
            *_all_beside("int4 beside any", "int4", None, 1.1),
            *_all_beside("q8_0, one file", "q8_0", 1.3, 1.3),
            *_all_beside("q4_0, one file", "q4_0", 1.3, 1.3),
            *_all_beside("q4_k, one file", "q4_k", 1.3, 1.3),
            *_all_shares("bf16", "bfloat16", 0.8),
        ),
        "Qwen3-0.6B's shape, random weights in bfloat16, or in what an engine makes of them,"
        f" two threads, {kind}; GGUF's types in one file for both engines. ONNX Runtime GenAI takes"
        " no batch of 64.",
        options="--shape 0.6B --peers all",
    )


# Machine on which each kind of CPU was measured; kinds are the kernels' instruction sets.
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
            f"seconds to load, `--weights {weights}`",
            value(*place("seconds"), form="{:.1f} s", most=MOST_LOAD_SECONDS),
            f"<= {MOST_LOAD_SECONDS:g}",
            "pages that nobody has written yet come at 1 GB/s in this virtual machine,"
            " and other work took more than half of its two cores.",
        ),
        Row(
            f"memory at its peak / of the weights, `--weights {weights}`",
            value(*place("share"), form="{:.2f}", most=MOST_LOAD_SHARE),
            f"<= {MOST_LOAD_SHARE:g}",
        ),
    )


MODEL_LOAD = Source(
    "model_load",
    (*_load("auto"), *_load("int8"), *_load("int4"), *_load("fp32")),
    "Loading a bfloat16 checkpoint of Qwen3-0.6B's shape, in a fresh process each time.",
    options="--other CHECKOUT",
)


LEAST_OVER_DENSE = 0.8


def _over_dense(family: str, case: str) -> Row:
    return Row(
        f"{family}, {case}: tokens per second / a dense model's of the same active weights",
        value("ratios", f"{family} over dense", case, least=LEAST_OVER_DENSE),
        f">= {LEAST_OVER_DENSE:g}",
        "at batch 8 a step reads most experts, and the dense model as much as at 1.",
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
        f"{family}, float32, 12 heads: share of memory bandwidth of what 4,096 tokens add to a"
        " step",
        value(*("attention", family, "share_of_bandwidth"), form="{:.2f}", least=LEAST_BANDWIDTH),
        f">= {LEAST_BANDWIDTH}",
        "see the kernels by themselves below.",
    )


FAMILIES = Source(
    "families",
    (
        *(
            Row(
                f"every family and case: tokens per second / {name}",
                partial(_families_over, peer),
                "> 1",
                "see the log.",
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
    "Families of models, float32, random weights, beside `transformers` and llama.cpp in one"
    " run, each with the same checkpoint.",
)


def _divergence(model: str, kind: str) -> Row:
    def measure(document: Json) -> Found:
        found = at(document, "files", f"{model} {kind}")
        ours, theirs = (number(found, engine, "kl") for engine in ("baton", "llamacpp"))
        same = (number(found, engine, "same_likeliest_token") for engine in ("baton", "llamacpp"))
        shares = ", ".join(f"{share:.1%}" for share in same)
        text = f"{ours / theirs:.2f} ({ours:.2g} / {theirs:.2g}; same token {shares})"
        return Found(text, ours <= theirs)

    return Row(f"{model}, {kind}: KL to float32 / llama.cpp's", measure, "<= 1", "see the log.")


DIVERGENCE = Source(
    "divergence",
    tuple(
        _divergence(model, kind)
        for model in ("SmolLM2-135M", "demo model")
        for kind in ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
    ),
    "Divergence of the next token's distribution from float32 with the same file's"
    " dequantized weights: mean KL divergence in nats, and how often the most likely token is the"
    " same. llama.cpp made the files, and scores the same tokens.",
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
        what,
        value("ratios", key, form="{:.3f}", least=least, most=most),
        f">= {least:g}" if least is not None else f"<= {most:g}",
        holds_back,
    )


_OTHERS = (
    "others used the machine, and ranks wait for the one of them that was interrupted; on a quiet"
    " machine it holds, see the log."
)


PARALLEL = Source(
    "parallel",
    (
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
    "Ranks of one machine: sums between two processes; a Qwen3 shape of 125 million random"
    " weights in float32, one thread a rank; hand-overs of the demo model in both orders of a"
    " block, `--kv-layout heads` and `layers`, each against nodes of one rank in the same order.",
)


SUBJECT = Subject(
    "On a CPU",
    (
        Measurement(
            "benchmarks.engine_cpu.engine_cpu",
            "kernels/csrc kernels/baton_kernels/native engine/worker models",
            ENGINE_CPU,
        ),
        Measurement("benchmarks.engine_cpu.divergence", "kernels/csrc models", (DIVERGENCE,)),
        Measurement(
            "benchmarks.engine_cpu.families",
            "kernels/csrc kernels/baton_kernels/native models",
            (FAMILIES,),
        ),
        Measurement(
            "benchmarks.engine_cpu.parallel",
            "models/parallel engine/executors kernels/csrc",
            (PARALLEL,),
        ),
        Measurement("benchmarks.engine_cpu.model_load", "models/loading", (MODEL_LOAD,)),
        Measurement("benchmarks.engine_cpu.perplexity", "kernels/csrc models"),
        Measurement("benchmarks.engine_cpu.compile_layers", "kernels/csrc models"),
    ),
    log=(
        "2026-11-28: what rounding of inputs costs beside llama.cpp",
        "2026-11-26: what ranks cost and bring",
        "2026-11-26: families again, and what bounds many heads over latents",
    ),
)
