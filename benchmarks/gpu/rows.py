"""Rows of docs/performance.md about measurements that need a GPU."""

from __future__ import annotations

import re

from benchmarks.page.measures import at, ratio, value
from benchmarks.page.rows import Found, Json, Measure, Measurement, Row, Source, Subject

LARGE_KV_BYTES = 512e6  # with less KV, the time of launches matters
FUSED = ("add_rms_norm", "norm_rotary_store", "silu_mul")
_FIGURE = re.compile(r"([^,]+) (-?[0-9.]+)(?:, |$)")
_DECODE = re.compile(r"decode (\d+)/(\d+), batch (\d+), context (\d+)")
HEAD_DIM, KV_ITEM_BYTES = 128, 2


def _figures(document: Json, part: str, words: str) -> dict[str, dict[str, float]]:
    """Return the figures of the part's rows whose names contain ``words``, by row."""
    return {
        name: {key.strip(): float(found) for key, found in _FIGURE.findall(text)}
        for name, text in at(document, "parts", part).items()
        if isinstance(text, str) and words in name
    }


def _least(part: str, words: str, figure: str, form: str = ".2f") -> Measure:
    """Return a measure that shows the range of a figure and judges the smallest value."""

    def measure(document: Json) -> Found:
        rows = _figures(document, part, words).items()
        found = [row[figure] for name, row in rows if words != "stream: " or name.endswith(FUSED)]
        return Found(f"{min(found):{form}} to {max(found):{form}}", min(found))

    return measure


def _decode_bandwidth(document: Json) -> Found:
    shares = [
        figures["of copy"]
        for name, figures in _figures(document, "attention", "decode ").items()
        if "batch" in name and _kv_bytes(name) >= LARGE_KV_BYTES
    ]
    return Found(f"{min(shares):.2f} to {max(shares):.2f}", min(shares))


def _kv_bytes(name: str) -> float:
    match = _DECODE.search(name)
    if match is None:
        raise ValueError(f"attention: no decode row, got {name!r}")
    _, kv_heads, batch, context = map(int, match.groups())
    return 2.0 * KV_ITEM_BYTES * HEAD_DIM * kv_heads * batch * context


def _sampling(document: Json) -> Found:
    (row,) = _figures(document, "kernels", "top-k 50, top-p 0.9, 64 rows").values()
    return Found(f"{row['torch / ours']:.1f}", row["torch / ours"])


def _right(document: Json) -> Found:
    parts = {name: at(document, "parts", name) for name in ("ops", "engine", "graphs", "split")}
    told = ", ".join(
        f"{name} {'not run' if 'not run' in part else 'yes' if at(part, 'ok') else 'NO'}"
        for name, part in parts.items()
    )
    return Found(told, all(at(part, "ok") is True for part in parts.values()))


def _company(document: Json) -> Found:
    part = at(document, "parts > company")
    return Found("yes" if at(part, "ok") else "NO", at(part, "ok") is True)


_PUSH = "parts > push > blocks of {} tokens, in a row: {}"
SUITE = Source("gpu_suite", (
    Row("tokens and ops are right on this GPU", _right, "all"),
    Row("paged decode attention, 512 MB of KV and more: share of copy bandwidth",
        _decode_bandwidth, ">= 0.90"),
    Row("paged decode attention: best library's time / ours, geometric mean",
        value("parts > attention > decode, library / ours", "{:.2f}"), ">= 1.0"),
    Row("prompt chunks over a paged prefix: best library's time / ours",
        _least("attention", "prefill ", "library / ours"), ">= 0.75"),
    Row("fused small kernels: share of copy bandwidth",
        _least("kernels", "stream: ", "of copy"), ">= 0.90"),
    Row("unfused torch ops / one kernel, 64 and 256 tokens",
        _least("kernels", "launch: ", "torch / ours", ".1f"), ">= 2"),
    Row("sampling, 64 x 151,936, top-k and top-p: torch's sort / ours", _sampling, ">= 10"),
    *(
        Row(f"decode step, 8B, context 1,024, batch {batch}: floor / measured",
            value(f"parts > decode > 8B, batch {batch}: floor / measured", "{:.2f}"), ">= 0.75")
        for batch in (1, 8, 64)
    ),
    Row("decode step, 0.6B, batch 1",
        value("parts > decode > 0.6B, batch 1: ms per step", "{:.2f} ms"), "<= 1.0 ms"),
    Row("nano-vllm's workload, 0.6B",
        value("parts > nano > output tokens per second", "{:,.0f} tok/s"), ">= 21,000 tok/s"),
    Row("idle share of the GPU in steady decode, 0.6B, batch 256",
        value("parts > decode > 0.6B, batch 256: idle", "{:.1f} %", scale=100), "<= 3 %"),
    Row("KV pushed over NIXL, blocks of 16 tokens / a copy on the device",
        ratio(_PUSH.format(16, "GB/s"), "parts > push > copy on the device, GB/s of payload",
              ".0f", " GB/s"), ">= 0.5"),
    Row("time to push blocks of 16 tokens / of 128",
        ratio(_PUSH.format(16, "ms"), _PUSH.format(128, "ms"), ""), "<= 1.15"),
    Row("with --batch-invariant: a request's tokens and logprobs are bit-identical alone, in a "
        "batch with others, in chunks and split", _company, "all"),
    *(
        Row(f"with --batch-invariant, 8B, context 1,024, {what}: time / time without the option",
            ratio(f"parts > invariant > batch-invariant, {what}: {unit}",
                  f"parts > invariant > as usual, {what}: {unit}", ""), "<= 1.05")
        for what, unit in (
            *((f"batch {batch}", "ms per step") for batch in (1, 8, 64)), ("prompt", "ms"),
        )
    ),
), absent="no GPU was at hand")  # fmt: skip


def _first(document: Json) -> Found:
    parts = at(document, "parts")
    right = [name for name, part in parts.items() if part["ok"]]
    others = ", ".join(name for name in parts if name not in right)
    return Found(f"{len(right)} of {len(parts)}" + f", not {others}" * bool(others), not others)


FIRST = Source(
    "gpu_first",
    (Row("parts that no GPU had run before are right", _first, "all"),),
    absent="no GPU was at hand",
)
SUBJECT = Subject(
    "On a GPU",
    (
        Measurement(
            "gpu.gpu_suite", "kernels/baton_kernels/triton engine/worker kvconnector", (SUITE,)
        ),
        Measurement(
            "gpu.gpu_first", "kernels/baton_kernels/triton engine/worker kvconnector", (FIRST,)
        ),
    ),
)
