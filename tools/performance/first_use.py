"""Rows about the first request of a fresh system, kind by kind."""

from __future__ import annotations

from tools.performance.rows import Area, Found, Json, Row, Source, at, number

MOST_RATIO = 1.3
_SHAPES = ("split", "colocated")
_KINDS = {
    "chat": "chat, not streamed",
    "streaming": "chat",
    "completion": "completion",
    "short_prompt": "chat of 8 words",
    "long_prompt": "chat of 1,500 words",
    "sampled": "chat with filters and penalties",
    "two_answers": "chat with n = 2",
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "tools_auto": "tools, auto",
    "tools_required": "tools, required",
    "tools_named": "tools, one named",
    "logprobs": "logprobs",
    "responses": "Responses",
    "custom_tool": "Responses, custom tool with a grammar",
    "messages": "Messages",
}


def _first_use(kind: str, what: str) -> Row:
    def measure(document: Json) -> Found:
        texts, ratios = list[str](), list[float]()
        for shape in _SHAPES:
            row = at(document, "shapes", shape, kind)
            ratios.append(number(row, "ratio"))
            first_ms, tenth_ms = (1e3 * number(row, name) for name in ("first_s", "tenth_s"))
            texts.append(f"{ratios[-1]:.2f} ({first_ms:.0f} / {tenth_ms:.0f} ms)")
        return Found("; ".join(texts), max(ratios) <= MOST_RATIO)

    return Row(what=what, target=f"<= {MOST_RATIO:g}", measure=measure)


AREAS = (
    Area(
        title="First requests",
        sources=(
            Source(
                name="first_use",
                command="benchmarks/first_use.py",
                intro="Time to the first byte of the first request after `baton up` says ready,"
                " over the median of the 8th to the 12th request of this kind: split; colocated."
                " Each kind has fresh systems. A prompt has 200 words where nothing else is said."
                " Each request has a new prompt, schema, tool or grammar.",
                rows=tuple(_first_use(kind, what) for kind, what in _KINDS.items()),
            ),
        ),
        log=("2026-11-28: the first request of each kind",),
    ),
)
