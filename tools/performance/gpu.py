"""Rows that need a GPU, and what can be said of its kernels without one."""

from __future__ import annotations

import re

from tools.performance.rows import Area, Found, Json, Row, Source, at, judge, number, ratio, value

LEAST_BANDWIDTH = 0.90
LARGE_KV_BYTES = 512e6  # below, a launch is a part of the time
FUSED = ("add_rms_norm", "norm_rotary_store", "silu_mul")
_FIGURE = re.compile(r"([^,]+) (-?[0-9.]+)(?:, |$)")
_DECODE = re.compile(r"decode (\d+)/(\d+), batch (\d+), context (\d+)")
HEAD_DIM, KV_ITEM_BYTES = 128, 2


def _figures(document: Json, part: str, words: str) -> dict[str, dict[str, float]]:
    """Find the rows of a part whose names contain the words: {row: {figure: value}}."""
    rows = {
        name: {key.strip(): float(found) for key, found in _FIGURE.findall(text)}
        for name, text in at(document, "parts", part).items()
        if isinstance(text, str) and words in name
    }
    if not rows:
        raise LookupError(f"{part}: no row with {words!r}")
    return rows


def _kv_bytes(name: str) -> float:
    match = _DECODE.search(name)
    if match is None:
        raise ValueError(f"attention: no decode row, got {name!r}")
    _, kv_heads, batch, context = map(int, match.groups())
    return 2.0 * KV_ITEM_BYTES * HEAD_DIM * kv_heads * batch * context


def _decode_bandwidth(document: Json) -> Found:
    shares = [
        figures["of copy"]
        for name, figures in _figures(document, "attention", "decode ").items()
        if "batch" in name and _kv_bytes(name) >= LARGE_KV_BYTES
    ]
    return Found(
        f"{min(shares):.2f} to {max(shares):.2f}", judge(min(shares), LEAST_BANDWIDTH, None, None)
    )


def _varlen(document: Json) -> Found:
    found = [row["library / ours"] for row in _figures(document, "attention", "prefill ").values()]
    return Found(f"{min(found):.2f} to {max(found):.2f}", judge(min(found), 0.75, None, None))


def _stream(document: Json) -> Found:
    rows = _figures(document, "kernels", "stream: ")
    shares = [row["of copy"] for name, row in rows.items() if name.endswith(FUSED)]
    return Found(f"{min(shares):.2f} to {max(shares):.2f}", judge(min(shares), 0.9, None, None))


def _launch(document: Json) -> Found:
    found = [row["torch / ours"] for row in _figures(document, "kernels", "launch: ").values()]
    return Found(f"{min(found):.1f} to {max(found):.1f}", judge(min(found), 2.0, None, None))


def _sampling(document: Json) -> Found:
    (row,) = _figures(document, "kernels", "top-k 50, top-p 0.9, 64 rows").values()
    found = row["torch / ours"]
    return Found(f"{found:.1f}", judge(found, 10.0, None, None))


def _right(document: Json) -> Found:
    parts = {name: at(document, "parts", name) for name in ("ops", "engine", "graphs", "split")}
    told = ", ".join(
        f"{name} {'not run' if 'not run' in part else 'yes' if at(part, 'ok') else 'NO'}"
        for name, part in parts.items()
    )
    return Found(told, all(at(part, "ok") is True for part in parts.values()))


def _company(document: Json) -> Found:
    part = at(document, "parts", "company")
    return Found("yes" if at(part, "ok") else "NO", at(part, "ok") is True)


def _invariant(figure: str) -> Row:
    """How much longer it takes where results depend on no company."""
    return Row(
        what="with --batch-invariant, 8B, context 1,024, "
        f"{figure.partition(':')[0]}: time / without",
        target="<= 1.05",
        measure=ratio(
            ("parts", "invariant", f"batch-invariant, {figure}"),
            ("parts", "invariant", f"as usual, {figure}"),
            form="{ratio:.2f}",
            most=1.05,
        ),
    )


def _step(shape: str, batch: int) -> tuple[str, ...]:
    return ("parts", "decode", f"{shape}, batch {batch}: floor / measured")


def _push(block_size: int, unit: str) -> tuple[str, ...]:
    return ("parts", "push", f"blocks of {block_size} tokens, in a row: {unit}")


SUITE = Source(
    name="gpu_suite",
    command="benchmarks/gpu_suite.py",
    absent="no GPU was at hand",
    rows=(
        Row(what="tokens and ops are right there", target="all", measure=_right),
        Row(
            what="paged decode attention, 512 MB of KV and more: share of copy bandwidth",
            target=f">= {LEAST_BANDWIDTH:.2f}",
            measure=_decode_bandwidth,
        ),
        Row(
            what="paged decode attention: best library's time / ours, geometric mean",
            target=">= 1.0",
            measure=value("parts", "attention", "decode, library / ours", form="{:.2f}", least=1.0),
        ),
        Row(
            what="prompt chunks over a paged prefix: best library's time / ours",
            target=">= 0.75",
            measure=_varlen,
        ),
        Row(what="fused small kernels: share of copy bandwidth", target=">= 0.90", measure=_stream),
        Row(
            what="unfused torch ops / one kernel, 64 and 256 tokens", target=">= 2", measure=_launch
        ),
        Row(
            what="sampling, 64 x 151,936, top-k and top-p: torch's sort / ours",
            target=">= 10",
            measure=_sampling,
        ),
        *(
            Row(
                what=f"decode step, 8B, context 1,024, batch {batch}: floor / measured",
                target=">= 0.75",
                measure=value(*_step("8B", batch), form="{:.2f}", least=0.75),
            )
            for batch in (1, 8, 64)
        ),
        Row(
            what="decode step, 0.6B, batch 1",
            target="<= 1.0 ms",
            measure=value(
                *("parts", "decode", "0.6B, batch 1: ms per step"), form="{:.2f} ms", most=1.0
            ),
        ),
        Row(
            what="nano-vllm's workload, 0.6B",
            target=">= 21,000 tok/s",
            measure=value(
                *("parts", "nano", "output tokens per second"), form="{:,.0f} tok/s", least=21_000.0
            ),
        ),
        Row(
            what="idle share of the GPU in steady decode, 0.6B, batch 256",
            target="<= 3 %",
            measure=value(
                *("parts", "decode", "0.6B, batch 256: idle"),
                form="{:.1f} %",
                scale=100.0,
                most=3.0,
            ),
        ),
        Row(
            what="KV pushed over NIXL, blocks of 16 tokens / a copy on the device",
            target=">= 0.5",
            measure=ratio(
                _push(16, "GB/s"),
                ("parts", "push", "copy on the device, GB/s of payload"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} GB/s)",
                least=0.5,
            ),
        ),
        Row(
            what="time to push blocks of 16 tokens / of 128",
            target="<= 1.15",
            measure=ratio(_push(16, "ms"), _push(128, "ms"), form="{ratio:.2f}", most=1.15),
        ),
        Row(
            what="with --batch-invariant: a request's tokens and logprobs, alone, beside others, "
            "in chunks and split, the same to the bit",
            target="all",
            measure=_company,
        ),
        *(_invariant(f"batch {batch}: ms per step") for batch in (1, 8, 64)),
        _invariant("prompt: ms"),
    ),
)


LAYERS = ("qkv", "o", "gate_up", "down")


def _product(weights: str, num_tokens: int, least: float, unmeasured: str = "") -> Row:
    """bfloat16's time over ours, all linear layers of a layer together."""

    def measure(document: Json) -> Found:
        us = {row["what"]: float(row["us"]) for row in document["rows"]}
        plain, ours = (
            sum(us[f"{layer}, {num_tokens} tokens, {one}"] for layer in LAYERS)
            for one in ("bfloat16", weights)
        )
        return Found(f"{plain / ours:.2f}", judge(plain / ours, least, None, None))

    tokens = "1 token" if num_tokens == 1 else f"{num_tokens:,} tokens"
    what = f"linear layers of 8B, weights in {weights}, {tokens}: bfloat16's time / ours"
    return Row(what=what, target=f">= {least:.1f}", measure=measure, unmeasured=unmeasured)


_CHANGED = "its kernels have changed since a GPU was at hand."
PRODUCTS = Source(
    name="quantized_gpu",
    command="benchmarks/quantized_gpu.py",
    absent="no GPU was at hand",
    rows=(
        *(_product("int8", count, least) for count, least in ((1, 1.3), (64, 1.0), (2048, 1.0))),
        *(_product("fp8", count, least) for count, least in ((1, 1.3), (64, 1.0))),
        _product("fp8, the vendor's", 2048, 1.4),
        _product("fp8, groups of 128", 1, 1.2),
        *(_product("int4", count, least, _CHANGED) for count, least in ((1, 1.5), (64, 1.0))),
        _product("int8-weight-only", 1, 1.2, _CHANGED),
    ),
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
        what=f"kernel variants for {architecture} that spill registers",
        target="0" if has_target else "",
        measure=measure,
        holds_back="the tile does not fit the registers.",
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

    return Row(what=f"registers per thread, {architecture}", measure=measure)


AHEAD = Source(
    name="kernels_aot",
    command="tools/compile_kernels.py",
    intro="Compiled ahead of time, without a GPU; `make kernels`. The same file everywhere.",
    rows=(
        _spills("sm_90", has_target=True),
        _spills("sm_80", has_target=False),
        _registers("sm_90"),
        _registers("sm_80"),
    ),
)

AREAS = (Area(title="On a GPU", sources=(SUITE, PRODUCTS, AHEAD)),)
