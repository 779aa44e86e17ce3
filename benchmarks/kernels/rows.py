"""Rows of the page about kernels by themselves: on a CPU, on a GPU, and compiled ahead."""

from __future__ import annotations

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
)

LEAST_BANDWIDTH = 0.70
SHORT_CONTEXT = 2048
LEAST_LONG_BANDWIDTH = 0.80
LEAST_PROMPT = 0.85


HOLDS_ATTENTION_BACK = (
    "keys and values of 16 tokens lie in pieces of 4 KiB: a loop that does nothing but read such"
    " pieces in any order reaches 0.75 of reading in a row. Those of float8 are of 2 KiB."
)


def _one_of(rows: Json, **wanted: str | int) -> Json:
    """Return the row that has these values."""
    for row in rows:
        if all(at(row, key) == value for key, value in wanted.items()):
            return row
    raise LookupError(f"no row for {wanted}")


def _attention(dtype: str, heads: str, context: int, batch: int, cache: str = "") -> Row:
    least = LEAST_LONG_BANDWIDTH if context > SHORT_CONTEXT else LEAST_BANDWIDTH
    wanted: dict[str, str | int] = {
        "dtype": dtype,
        "heads": heads,
        "context": context,
        "batch": batch,
    }

    def measure(document: Json) -> Found:
        row = _one_of(at(document, "attention"), cache=cache or dtype, **wanted)
        share, times = number(row, "share_of_bandwidth"), number(row, "times_torch")
        text = f"{share:.2f}; {times:.1f} times as fast as plain torch"
        return Found(text, judge(share, least, None, None))

    of_cache = f", a cache of {cache.partition('_')[0]}" if cache else ""
    return Row(
        f"paged decode attention, {dtype}{of_cache}, context {context:,}, heads {heads},"
        f" batch {batch}: share of memory bandwidth",
        measure,
        f">= {least}",
        HOLDS_ATTENTION_BACK,
    )


def _prompt(dtype: str, tokens: int) -> Row:
    def measure(document: Json) -> Found:
        row = _one_of(at(document, "prompt_attention"), dtype=dtype, tokens=tokens)
        share = number(row, "share_of_linear")
        return Found(f"{share:.2f}", judge(share, LEAST_PROMPT, None, None))

    return Row(
        f"attention of a prompt of {tokens:,} tokens, {dtype}: rate of its products / of those"
        " of linear layers",
        measure,
        f">= {LEAST_PROMPT}",
        "weights of a softmax, and packing keys and values for every 384 rows.",
    )


def _latents(dtype: str, heads: int, batch: int) -> Row:
    def measure(document: Json) -> Found:
        row = _one_of(at(document, "latent_attention"), dtype=dtype, heads=heads, batch=batch)
        share, limit = number(row, "share_of_bandwidth"), number(row, "share_of_limit")
        text = f"{share:.2f}; {limit:.2f} of the limit that products or reading set"
        return Found(text, share >= LEAST_BANDWIDTH)

    return Row(
        f"paged decode attention over latents (512 + 64), context 4,096, {dtype}, {heads}"
        f" heads, batch {batch}: share of memory bandwidth",
        measure,
        f">= {LEAST_BANDWIDTH}",
        "each number read is multiplied for every head, twice: 128 heads wait for"
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
        f"packed {storage} linear layer, {rows} rows: times as fast as F.linear, by shape", measure
    )


KERNELS_CPU = Source(
    "kernels_cpu",
    (
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


LAYERS = ("qkv", "o", "gate_up", "down")


def _product(weights: str, num_tokens: int, least: float, unmeasured: str = "") -> Row:
    """Divide bfloat16's time by ours, over all linear layers of a layer."""

    def measure(document: Json) -> Found:
        us = {row["what"]: float(row["us"]) for row in document["rows"]}
        plain, ours = (
            sum(us[f"{layer}, {num_tokens} tokens, {one}"] for layer in LAYERS)
            for one in ("bfloat16", weights)
        )
        return Found(f"{plain / ours:.2f}", judge(plain / ours, least, None, None))

    tokens = "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"
    what = f"linear layers of 8B, weights in {weights}, {tokens}: bfloat16's time / ours"
    return Row(what, measure, f">= {least:.1f}", unmeasured=unmeasured)


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


def _by_release(document: Json, architecture: str, figure: str) -> dict[str, dict[str, float]]:
    """Release of Triton -> kernel -> figure; older GPUs have no float8 and fewer kernels."""
    return {
        release: {
            name: number(of, architecture, figure)
            for name, of in found["kernels"].items()
            if architecture in of
        }
        for release, found in at(document, "releases").items()
    }


def _spills(architecture: str, *, has_target: bool) -> Row:
    def measure(document: Json) -> Found:
        texts, any_spills = [], False
        for release, found in _by_release(document, architecture, "spill_bytes").items():
            spilling = [name for name, spilled in found.items() if spilled]
            any_spills = any_spills or bool(spilling)
            text = f"Triton {release}: {len(spilling)} of {len(found)}"
            if spilling:
                text += ": " + ", ".join(f"{name} ({found[name]:.0f} bytes)" for name in spilling)
            texts.append(text)
        return Found("; ".join(texts), not any_spills if has_target else None)

    return Row(
        f"kernel variants for {architecture} that spill registers",
        measure,
        "0" if has_target else "",
        "the tile does not fit the registers.",
    )


def _registers(architecture: str) -> Row:
    def measure(document: Json) -> Found:
        texts = []
        for release, found in _by_release(document, architecture, "registers").items():
            ranges = []
            for kind in ("decode_attention", "varlen_attention", "sampling"):
                of_kind = [count for name, count in found.items() if name.startswith(kind)]
                ranges.append(f"{kind} {min(of_kind):.0f} to {max(of_kind):.0f}")
            texts.append(f"Triton {release}: " + ", ".join(ranges))
        return Found("; ".join(texts))

    return Row(f"registers per thread, {architecture}", measure)


AHEAD = Source(
    "kernels_aot",
    (
        _spills("sm_90", has_target=True),
        _spills("sm_80", has_target=False),
        _registers("sm_90"),
        _registers("sm_80"),
    ),
    "Compiled ahead of time, without a GPU; `make kernels`. The same file everywhere.",
)


SUBJECT = Subject(
    "Kernels",
    (
        Measurement(
            "benchmarks.kernels.kernels",
            "kernels/csrc kernels/baton_kernels/native",
            (KERNELS_CPU,),
        ),
        Measurement("benchmarks.kernels.kernels_gpu", "kernels/baton_kernels/triton", (PRODUCTS,)),
        Measurement("tools.compile_kernels", "kernels/baton_kernels/triton", (AHEAD,)),
    ),
    log=("2026-11-21: paged attention and projections on a CPU",),
)
