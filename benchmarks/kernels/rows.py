"""Rows of docs/performance.md about single kernels: on a CPU, on a GPU, and compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.page.measures import at, number, told
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject

HOLDS_ATTENTION_BACK = (
    "keys and values of 16 tokens lie in pieces of 4 KiB (float8: smaller ones of 2 KiB). A loop"
    " that only reads pieces of 4 KiB in random order reaches 0.75 of the speed of reading in"
    " sequence."
)


def _attention(dtype: str, heads: str, context: int, batch: int, cache: str = "") -> Row:
    row = f"dtype={dtype}, heads={heads}, context={context}, batch={batch}, cache={cache or dtype}"
    of_cache = f", a cache of {cache.partition('_')[0]}" if cache else ""
    return Row(
        f"paged decode attention, {dtype}{of_cache}, context {context:,}, heads {heads},"
        f" batch {batch}: share of memory bandwidth",
        told(
            f"attention > {row}",
            "{share_of_bandwidth:.2f}; {times_torch:.1f} times as fast as plain torch",
            "share_of_bandwidth",
        ),
        ">= 0.8" if context > 2048 else ">= 0.7",
        HOLDS_ATTENTION_BACK,
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
        f"packed {storage} linear layer, {rows} rows: times as fast as F.linear, by shape", measure
    )


KERNELS_CPU = Source("kernels_cpu", (
    *(
        _attention("float32", heads, 2048, batch)
        for heads in ("8/2 x 64", "8/4 x 128")
        for batch in (8, 32)
    ),
    *(
        _attention("bfloat16", "16/8 x 128", context, batch, cache)
        for cache in ("", "float8_e4m3fn")
        for context, batch in ((4096, 8), (16384, 2))
    ),
    *(
        Row(f"attention of a prompt of {tokens:,} tokens, {dtype}: FLOP rate / that of linear"
            " layers",
            told(f"prompt_attention > dtype={dtype}, tokens={tokens}", "{share_of_linear:.2f}",
                 "share_of_linear"), ">= 0.85",
            "softmax weights take time, and so does packing keys and values for every 384 rows.")
        for dtype in ("float32", "bfloat16")
        for tokens in (4096, 8192, 16384)
    ),
    *(
        Row(f"paged decode attention over latents (512 + 64), context 4,096, {dtype}, {heads}"
            f" heads, batch {batch}: share of memory bandwidth",
            told(f"latent_attention > dtype={dtype}, heads={heads}, batch={batch}",
                 "{share_of_bandwidth:.2f}; {share_of_limit:.2f} of the limit set by products"
                 " or reading", "share_of_bandwidth"), ">= 0.7",
            "each number is read once and multiplied twice for every head, so products bound"
            " 128 heads. The limit is the longer time: of reading, or of a large product by torch.")
        for dtype in ("float32", "bfloat16")
        for heads in (16, 128)
        for batch in (1, 8)
    ),
    *(_linear(storage, rows) for rows in (1, 8, 32, 512) for storage in ("fp32", "int8")),
))  # fmt: skip


def _product(weights: str, num_tokens: int, least: float, unmeasured: str = "") -> Row:
    """Return the row of bfloat16's time / our time, for the sum of a layer's linear layers."""

    def measure(document: Json) -> Found:
        us = {row["what"]: float(row["us"]) for row in document["rows"]}
        plain, ours = (
            sum(us[f"{layer}, {num_tokens} tokens, {one}"] for layer in _LAYERS)
            for one in ("bfloat16", weights)
        )
        return Found(f"{plain / ours:.2f}", plain / ours)

    tokens = "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"
    what = f"linear layers of 8B, weights in {weights}, {tokens}: bfloat16's time / ours"
    return Row(what, measure, f">= {least:.1f}", unmeasured=unmeasured)


_LAYERS = ("qkv", "o", "gate_up", "down")
_CHANGED = "its kernels have changed since a GPU was at hand."
PRODUCTS = Source(
    "quantized_gpu",
    (
        *(_product("int8", count, least) for count, least in ((1, 1.3), (64, 1.0), (2048, 1.0))),
        *(_product("fp8", count, least) for count, least in ((1, 1.3), (64, 1.0))),
        _product("fp8, the vendor's", 2048, 1.4),
        _product("fp8, groups of 128", 1, 1.2),
        *(_product("int4", count, least, _CHANGED) for count, least in ((1, 1.5), (64, 1.0))),
        _product("int8-weight-only", 1, 1.2, _CHANGED),
    ),
    options="--groups products",
    absent="no GPU was at hand",
)


def _by_release(
    document: Json, architecture: str, figure: str
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each Triton release, and one figure of each kernel for the architecture.

    Older architectures have fewer kernels, because they do not support float8.
    """
    for release, found in at(document, "releases").items():
        kernels = found["kernels"].items()
        yield (
            f"Triton {release}",
            {name: number(of, architecture, figure) for name, of in kernels if architecture in of},
        )


def _spills(architecture: str, target: str = "") -> Row:
    def measure(document: Json) -> Found:
        texts, num_spilling = [], 0
        for release, found in _by_release(document, architecture, "spill_bytes"):
            spilling = [f"{name} ({size:.0f} bytes)" for name, size in found.items() if size]
            num_spilling += len(spilling)
            named = f": {', '.join(spilling)}" if spilling else ""
            texts.append(f"{release}: {len(spilling)} of {len(found)}{named}")
        return Found("; ".join(texts), num_spilling)

    what = f"kernel variants for {architecture} that spill registers"
    return Row(what, measure, target, "the tile does not fit the registers.")


def _registers(architecture: str) -> Row:
    def measure(document: Json) -> Found:
        texts = []
        for release, found in _by_release(document, architecture, "registers"):
            ranges = []
            for kind in ("decode_attention", "varlen_attention", "sampling"):
                of_kind = [count for name, count in found.items() if name.startswith(kind)]
                ranges.append(f"{kind} {min(of_kind):.0f} to {max(of_kind):.0f}")
            texts.append(f"{release}: " + ", ".join(ranges))
        return Found("; ".join(texts))

    return Row(f"registers per thread, {architecture}", measure)


AHEAD = Source(
    "kernels_aot",
    (_spills("sm_90", "0"), _spills("sm_80"), _registers("sm_90"), _registers("sm_80")),
    "Compiled ahead of time, without a GPU; `make kernels`. The same file everywhere.",
)


def _shared(part: str, case: str, what: str, target: str, why: str = "") -> Row:
    def measure(document: Json) -> Found:
        row = at(document, part)[case]
        apart, shared, found = (number(row, name) for name in ("apart_ms", "shared_ms", "ratio"))
        return Found(f"{found:.2f} ({apart:.2f} / {shared:.2f} ms)", found)

    return Row(what, measure, target, why)


def _least_shared(document: Json) -> Found:
    found = {case: number(row, "ratio") for case, row in at(document, "attention").items()}
    slowest = min(found, key=found.__getitem__)
    return Found(f"{found[slowest]:.3f} ({slowest})", found[slowest])


_COMMON = "32 decodes, 4,096 common tokens, 16 of their own"
SHARED_PREFIXES = Source(
    "shared_prefixes",
    (
        *(
            _shared("attention", f"{dtype}: {_COMMON}", f"attention, {dtype}: {_COMMON}", ">= 2")
            for dtype in ("float32", "bfloat16")
        ),
        *(
            _shared(
                "steps", dtype, f"a whole step, {dtype}: {_COMMON}", ">= 2",
                "the other layers of 125 million weights take as long with and without sharing.",
            )
            for dtype in ("float32", "bfloat16")
        ),
        Row("the slowest of 16 cases of attention", _least_shared, ">= 0.99"),
    ),
    "Decodes whose first blocks are equal: processor time of one thread without shared spans,"
    " divided by its time with shared spans. The heads are those of the 125M shape.",
    absent="no run was saved yet",
)  # fmt: skip
SUBJECT = Subject(
    "Kernels",
    (
        Measurement("kernels.kernels", "kernels/csrc kernels/baton_kernels/native", (KERNELS_CPU,)),
        Measurement("kernels.shared_prefixes", "kernels/csrc", (SHARED_PREFIXES,)),
        Measurement("kernels.kernels_gpu", "kernels/baton_kernels/triton", (PRODUCTS,)),
        Measurement("tools.compile_kernels", "kernels/baton_kernels/triton", (AHEAD,)),
    ),
    log=("2026-11-21: paged attention and projections on a CPU",),
)
