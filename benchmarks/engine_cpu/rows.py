"""Rows of docs/performance.md about engines on a CPU, compared with other engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.page.measures import at, number, told, value
from benchmarks.page.rows import Found, Json, Measure, Measurement, Row, Source, Subject

_PROMPTS = ("prefill 512", "prefill 2048", "prefill 8192")
_CASES = (*_PROMPTS, "decode 1", "decode 8", "decode 32", "decode 64")
# Name of a comparison in the result file -> the row's words for both sides' weights.
_PAIRS = {
    "int8 beside int8": "int8, peers in int8",
    "int8 beside any": "int8, peers in any format",
    "int4 beside any": "int4, peers in any format",
    "q8_0, one file": "GGUF q8_0, both from one file",
    "q4_0, one file": "GGUF q4_0, both from one file",
    "q4_k, one file": "GGUF q4_k, both from one file",
}


def _words(case: str) -> str:
    """Return the row's words for a case: the tokens of a prefill, or the batch of a decode."""
    kind, _, size = case.partition(" ")
    return f"prefill of {size} tokens" if kind == "prefill" else f"decode, batch {size}"


def _beside(pair: str, ours: str, case: str, least: float) -> Row:
    """Return the row that compares Baton with the best of the engines that a pair names."""

    def measure(document: Json) -> Found:
        found = number(document, "ratio_to_best_peer", pair, case)
        rate = number(document, "tokens_per_second", f"baton {ours}".strip(), case)
        return Found(f"{found:.2f} ({rate:.1f} tok/s)", found)

    what = f"{_words(case)}, {_PAIRS.get(pair, pair)}: tokens/s divided by the best peer's"
    return Row(what, measure, f">= {least:g}", "see the log.")


def _all_beside(
    pair: str, ours: str, prefill: float | None, decode: float | None, decode_1: float | None = None
) -> list[Row]:
    goals = {case: prefill if case.startswith("prefill") else decode for case in _CASES}
    goals["decode 1"] = decode_1 or decode
    return [_beside(pair, ours, case, least) for case, least in goals.items() if least is not None]


def _all_shares(weights: str, dtype: str, prefill: float) -> list[Row]:
    """Return rows with each case's share of the machine's limit (`engine_cpu.shares_of_limits`)."""
    of_product = f"FLOP rate divided by that of one large {dtype} matrix multiplication"
    goals = [(case, of_product, prefill) for case in _PROMPTS]
    of_memory = "share of memory's read bandwidth"
    return [
        Row(
            f"{_words(case)}, {weights or dtype}: {what}",
            value(f"share_of_limit > {f'baton {weights}'.strip()} > {case}"),
            f">= {least:g}",
            "see the log.",
        )
        for case, what, least in (*goals, ("decode 1", of_memory, 0.85))
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
        "Qwen3-0.6B's shape, random weights in bfloat16, or converted from these by each engine,"
        f" two threads, {kind}. For GGUF's types both engines read one file. ONNX Runtime GenAI"
        " does not support a batch of 64.",
        options="--shape 0.6B --peers all",
    )


# One table per checkpoint and kind of CPU; kinds are the kernels' instruction sets.
ENGINE_CPU = (
    _of_125m("x86-64-v4-bf16"),
    _of_125m("x86-64-v3"),
    _of_06b("x86-64-v4-amx"),
    _of_06b("x86-64-v4-bf16"),
    _of_06b("x86-64-v3"),
)
VISION = Source(
    "vision",
    tuple(
        Row(
            f"{shape}, {size} pixels, {dtype}: transformers' time / ours",
            value(f"cases > {shape}, {size} pixels, {dtype} > ratio"),
            ">= 1.5",
            "see the log.",
        )
        for shape in ("siglip", "qwen2.5-vl")
        for size in ("384", "1024")
        for dtype in ("float32", "bfloat16")
    ),
    "Vision encoders of published shapes with two layers and random weights, two threads, beside"
    " `transformers` in one process.",
)
MODEL_LOAD = Source("model_load", tuple(
    row
    for weights in ("auto", "int8", "int4", "fp32")
    for row in (
        Row(f"seconds to load, `--weights {weights}`",
            value(f"weights > {weights} > this > seconds", "{:.1f} s"), "<= 1.5",
            "pages that nobody has written yet come at 1 GB/s in this virtual machine,"
            " and other work took more than half of its two cores."),
        Row(f"peak memory / memory of the weights, `--weights {weights}`",
            value(f"weights > {weights} > this > share", "{:.2f}"), "<= 1.15"),
    )
), "Loading a bfloat16 checkpoint of Qwen3-0.6B's shape, in a fresh process each time.",
   options="--other CHECKOUT")  # fmt: skip


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
        f"{ratios[worst]:.2f} to {max(ratios.values()):.2f}, worst: {', '.join(worst)};"
        f" {len(ratios) - num_slower} of {len(ratios)} faster"
    )
    return Found(text, ratios[worst])


FAMILIES = Source("families", (
    *(
        Row(f"every family and case: tokens per second / {name}",
            partial(_families_over, peer), "> 1", "see the log.")
        for peer, name in (("transformers", "`transformers`'"), ("llamacpp", "llama.cpp's"))
    ),
    *(
        Row(f"{family}, {case}: tokens/s / those of a dense model with equally many active weights",
            value(f"ratios > {family} over dense > {case}"), ">= 0.8",
            "at batch 8 a step reads most experts, while a dense model reads the same weights as at"
            " batch 1.")
        for family in ("Qwen3-MoE", "Mixtral")
        for case in ("decode 1", "decode 8")
    ),
    *(
        Row(f"{family}, float32, 12 heads: rate of reading the KV of 4,096 more tokens of context"
            " in a step / memory bandwidth",
            value(f"attention > {family} > share_of_bandwidth", "{:.2f}"), ">= 0.7",
            "see the kernels by themselves below.")
        for family in ("Qwen3", "DeepSeek-V2")
    ),
), "Families of models, float32, random weights, compared with `transformers` and llama.cpp in"
   " one run, each with the same checkpoint.")  # fmt: skip


def _divergence(model: str, kind: str) -> Row:
    def measure(document: Json) -> Found:
        found = at(document, "files", f"{model} {kind}")
        ours, theirs = (number(found, engine, "kl") for engine in ("baton", "llamacpp"))
        same = (number(found, engine, "same_likeliest_token") for engine in ("baton", "llamacpp"))
        shares = ", ".join(f"{share:.1%}" for share in same)
        text = f"{ours / theirs:.2f} ({ours:.2g} / {theirs:.2g}; same token {shares})"
        return Found(text, ours / theirs)

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


def _of_ranks(what: str, key: str, target: str, holds_back: str = "") -> Row:
    return Row(what, value(f"ratios > {key}", "{:.3f}"), target, holds_back)


def _by_steps(shape: str, routing: str) -> Measure:
    """Make a row that shows the ratio of each kind of step, without a verdict."""

    def measure(document: Json) -> Found:
        steps = at(document, "shapes")[shape]
        return Found(", ".join(f"{steps[f'{one}, {routing}']['ratio']:.2f}" for one in _STEPS))

    return measure


_STEPS = ("1 decode", "8 decodes", "64 decodes", "prompt of 512")
_OTHERS = (
    "others used the machine, and all ranks wait for an interrupted one; on a quiet machine the"
    " target holds, see the log."
)
PARALLEL = Source("parallel", (
    _of_ranks("sums of 8 to 64 KiB in shared memory: time / gloo's, the worst", "sums", "<= 0.2"),
    _of_ranks("TP 2, decode 1: speed / 2 threads", "decode TP 2 / 2 threads", ">= 0.9", _OTHERS),
    _of_ranks("TP 2, decode 1: speed / 1 thread", "decode TP 2 / 1 thread", ">= 1.6", _OTHERS),
    _of_ranks("PP 2, a prompt of 12 chunks: speed / 1 thread", "prompt PP 2 / 1 thread", ">= 1.7",
              "other work on the machine; 1.79 in a quieter run, see the log."),
    _of_ranks("PP 2 (8 + 4 layers), 16 decodes: speed / 1 thread",
              "16 decodes, PP 2, 8 + 4 layers / 1 thread", ">= 1.6",
              "a step of 8 rows takes about 0.6 of the time of a step of 16, because both read all"
              " weights, so two stages cannot be more than about 1.65 times as fast."),
    _of_ranks("PP 2, 4 prompts of 12 chunks: speed / 1 thread", "4 prompts, PP 2 / 1 thread",
              ">= 1.8", _OTHERS),
    _of_ranks("hidden states of 24 KiB between two busy stages, p90: time / gloo's", "mail",
              "<= 0.5"),
    _of_ranks("a rank that waits: share of a core", "idle rank, share of a core", "<= 0.01"),
    *(
        _of_ranks(f"exposed transfer {shape.replace('->', 'to')} / P1 to D1, layout {layout}",
                  f"hand-over {shape}, {layout}", "<= 1.15")
        for layout in ("heads", "layers")
        for shape in ("P2 -> D1", "P1 -> D2")
    ),
    *(
        _of_ranks(f"ranges per block and pair of ranks, TP 1 and 2, layout {layout}",
                  f"descriptors per block and pair, {layout}", "<= 1", why)
        for layout, why in (
            ("heads", ""),
            ("layers", "a pair of ranks writes two ranges per layer; with `heads` it writes one."),
        )
    ),
), "Ranks of one machine: sums between two processes; a Qwen3 shape of 125 million random"
   " weights in float32, one thread a rank; hand-offs of the demo model with both orders within a"
   " block, `--kv-layout heads` and `layers`. P1 and P2: a prefill node of one or two ranks; D1"
   " and D2: a decode node.")  # fmt: skip


EXPERT_PARALLEL = Source("expert_parallel", tuple(
    Row(f"{size} over {ranks} ranks, {format_}, {routing} routing: {', '.join(_STEPS)}",
        _by_steps(f"{format_}, {size}, {ranks} ranks", routing))
    for size, ranks in ((384, 2), (768, 2), (768, 4))
    for format_ in ("bf16", "int4")
    for routing in ("even", "skewed")
), "Whole experts per rank (`--expert-parallel on`): time of a layer's experts on the slowest"
   " rank, divided by the time with a part of every expert per rank. 32 experts, 4 per token,"
   " hidden size 2,048. With skewed routing the n-th expert is chosen with odds of 1/n. Below 1,"
   " whole experts are faster.")  # fmt: skip


def _routed(column: str, form: str, best: Callable[..., float]) -> Measure:
    """Make a row: the cost policy's figure / the best figure of policies that ignore adapters."""

    def measure(document: Json) -> Found:
        found = {name: number(row, column) for name, row in at(document, "routing").items()}
        ratio = found["cost"] / best(value for name, value in found.items() if name != "cost")
        shown = ", ".join(f"{name} {one:{form}}" for name, one in found.items())
        return Found(f"{ratio:.2f} ({shown})", ratio)

    return measure


ADAPTERS = Source("adapters", (
    Row("decode, batch 8, four adapters: tokens/s / the base model's",
        value("tokens_per_second > baton > decode 8 > ratio"), ">= 0.85", "see the log."),
    Row("prefill of four prompts of 512 tokens, four adapters: tokens/s / the base model's",
        value("tokens_per_second > baton > prefill 2048 > ratio"), ">= 0.92", "see the log."),
    Row("decode, batch 8, four adapters: tokens/s / llama.cpp's",
        value("over_peers > llamacpp > decode 8"), "> 1", "see the log."),
    Row("prefill of four prompts of 512 tokens, four adapters: tokens/s / llama.cpp's",
        value("over_peers > llamacpp > prefill 2048"), "> 1", "see the log."),
    Row("cold adapter: TTFT / the longer of its load and its queue and prefill, median",
        told("cold", "{ttft_of_longer_part_p50:.2f} (TTFT {cold_ttft_p50_ms:.0f} ms, load"
                 " {load_p50_ms:.0f} ms, prefill {prefill_p50_ms:.0f} ms; adapters in memory:"
                 " TTFT {warm_ttft_p50_ms:.0f} ms)", "ttft_of_longer_part_p50"),
        "<= 1.1", "see the log."),
    Row("requests of the base model: ITL p99 while adapters are loaded / while none is",
        told("cold", "{itl_p99_ratio:.2f} ({cold_itl_p99_ms:.0f} / {warm_itl_p99_ms:.0f} ms; p50"
                 " {cold_itl_p50_ms:.0f} / {warm_itl_p50_ms:.0f})", "itl_p99_ratio"),
        "<= 1.05", "see the log."),
    *(Row(f"64 of 1,000 adapters, asked for by Zipf's law: {what}, `cost` / the best policy that"
          " does not see adapters", _routed(column, form, best), target, "see the log.")
      for what, column, form, best, target in (
          ("hit rate", "hit_rate", ".2f", max, "> 1"),
          ("TTFT p50", "ttft_p50_ms", ".0f", min, "< 1"),
          ("TTFT p99", "ttft_p99_ms", ".0f", min, "< 1"))),
), "LoRA adapters of ranks 8, 16, 32 and 64 on all linear layers of Qwen3-0.6B's shape, random"
   " weights in bfloat16, two threads. Base and adapters in turns in one process; llama.cpp with"
   " the same weights and adapters. Cold adapters (rank 16): router, P and D over HTTP on two"
   " cores, four users of the base model, and a request of 256 tokens for an adapter every two"
   " seconds. Routing: the demo model, two nodes of each role with 16 slots each, eight requests"
   " at a time, and no cache of adapters that left a node.",
   options="--peers llamacpp")  # fmt: skip
SUBJECT = Subject(
    "On a CPU",
    (
        Measurement(
            "engine_cpu.engine_cpu",
            "kernels/csrc kernels/baton_kernels/native engine/worker models",
            ENGINE_CPU,
        ),
        Measurement("engine_cpu.divergence", "kernels/csrc models", (DIVERGENCE,)),
        Measurement("engine_cpu.dtypes", "kernels/csrc models engine/worker/device_choice.py"),
        Measurement(
            "engine_cpu.vision",
            "kernels/csrc kernels/baton_kernels/native models/vision",
            (VISION,),
        ),
        Measurement(
            "engine_cpu.families", "kernels/csrc kernels/baton_kernels/native models", (FAMILIES,)
        ),
        Measurement(
            "engine_cpu.adapters",
            "kernels/csrc kernels/baton_kernels/native models/adapters"
            " node_runtime/adapters router/fleet/adapter_places.py router/policies",
            (ADAPTERS,),
        ),
        Measurement(
            "engine_cpu.parallel", "models/parallel engine/executors kernels/csrc", (PARALLEL,)
        ),
        Measurement(
            "engine_cpu.expert_parallel",
            "models/parallel/experts.py kernels/csrc/experts.c",
            (EXPERT_PARALLEL,),
        ),
        Measurement("engine_cpu.model_load", "models/loading", (MODEL_LOAD,)),
        Measurement("engine_cpu.perplexity", "kernels/csrc models"),
    ),
    log=(
        "2026-11-28: what rounding of inputs costs beside llama.cpp",
        "2026-11-26: what ranks cost and bring",
        "2026-11-26: families again, and what bounds many heads over latents",
    ),
)
