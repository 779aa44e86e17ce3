"""Rows of the page about all that needs a GPU."""

from __future__ import annotations

import re

from benchmarks.page.rows import (
    Found,
    Json,
    Measurement,
    Row,
    Source,
    Subject,
    at,
    judge,
    ratio,
    value,
)

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
    """Return how much longer steps take with batch-invariant results."""
    return Row(
        f"with --batch-invariant, 8B, context 1,024, {figure.partition(':')[0]}: time / without",
        ratio(
            ("parts", "invariant", f"batch-invariant, {figure}"),
            ("parts", "invariant", f"as usual, {figure}"),
            form="{ratio:.2f}",
            most=1.05,
        ),
        "<= 1.05",
    )


def _step(shape: str, batch: int) -> tuple[str, ...]:
    return ("parts", "decode", f"{shape}, batch {batch}: floor / measured")


def _push(block_size: int, unit: str) -> tuple[str, ...]:
    return ("parts", "push", f"blocks of {block_size} tokens, in a row: {unit}")


SUITE = Source(
    "gpu_suite",
    (
        Row("tokens and ops are right there", _right, "all"),
        Row(
            "paged decode attention, 512 MB of KV and more: share of copy bandwidth",
            _decode_bandwidth,
            f">= {LEAST_BANDWIDTH:.2f}",
        ),
        Row(
            "paged decode attention: best library's time / ours, geometric mean",
            value("parts", "attention", "decode, library / ours", form="{:.2f}", least=1.0),
            ">= 1.0",
        ),
        Row("prompt chunks over a paged prefix: best library's time / ours", _varlen, ">= 0.75"),
        Row("fused small kernels: share of copy bandwidth", _stream, ">= 0.90"),
        Row("unfused torch ops / one kernel, 64 and 256 tokens", _launch, ">= 2"),
        Row("sampling, 64 x 151,936, top-k and top-p: torch's sort / ours", _sampling, ">= 10"),
        *(
            Row(
                f"decode step, 8B, context 1,024, batch {batch}: floor / measured",
                value(*_step("8B", batch), form="{:.2f}", least=0.75),
                ">= 0.75",
            )
            for batch in (1, 8, 64)
        ),
        Row(
            "decode step, 0.6B, batch 1",
            value(*("parts", "decode", "0.6B, batch 1: ms per step"), form="{:.2f} ms", most=1.0),
            "<= 1.0 ms",
        ),
        Row(
            "nano-vllm's workload, 0.6B",
            value(
                *("parts", "nano", "output tokens per second"), form="{:,.0f} tok/s", least=21_000.0
            ),
            ">= 21,000 tok/s",
        ),
        Row(
            "idle share of the GPU in steady decode, 0.6B, batch 256",
            value(
                *("parts", "decode", "0.6B, batch 256: idle"),
                form="{:.1f} %",
                scale=100.0,
                most=3.0,
            ),
            "<= 3 %",
        ),
        Row(
            "KV pushed over NIXL, blocks of 16 tokens / a copy on the device",
            ratio(
                _push(16, "GB/s"),
                ("parts", "push", "copy on the device, GB/s of payload"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} GB/s)",
                least=0.5,
            ),
            ">= 0.5",
        ),
        Row(
            "time to push blocks of 16 tokens / of 128",
            ratio(_push(16, "ms"), _push(128, "ms"), form="{ratio:.2f}", most=1.15),
            "<= 1.15",
        ),
        Row(
            "with --batch-invariant: a request's tokens and logprobs, alone, beside others, "
            "in chunks and split, the same to the bit",
            _company,
            "all",
        ),
        *(_invariant(f"batch {batch}: ms per step") for batch in (1, 8, 64)),
        _invariant("prompt: ms"),
    ),
    absent="no GPU was at hand",
)


SUBJECT = Subject(
    "On a GPU",
    (
        Measurement(
            "benchmarks.gpu.gpu_suite",
            "kernels/baton_kernels/triton engine/worker kvconnector",
            (SUITE,),
        ),
    ),
)
