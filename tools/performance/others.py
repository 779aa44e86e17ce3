"""Rows about what other programs say of Baton: two generators of load."""

from __future__ import annotations

from tools.performance.rows import Area, Found, Json, Row, Source, at, number

WITHIN = 0.05  # of each other


# ---------------------------------------------------------------- load tests


_UNITS = {"ttft": "TTFT", "itl": "time per token after the first", "e2e": "E2E"}
_RATES = {
    "requests_per_s": "requests per second",
    "output_tokens_per_s": "output tokens per second",
}


def _agreement(load: str, key: str, what: str) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "loads", load, "medians", key)
        apart = number(row, "apart")
        values = " / ".join(f"{number(row, who):.4g}" for who in ("baton", "aiperf", "guidellm"))
        unit = " ms" if key.endswith("_ms") else ""
        return Found(f"{apart:.1%} ({values}{unit})", apart <= WITHIN)

    return Row(what=f"{load}: {what}", target=f"within {WITHIN:.0%}", measure=measure)


AGREEMENT = Source(
    name="loadtest_agreement",
    command="benchmarks/loadtest_agreement.py",
    intro="One load by `baton loadtest`, AIPerf and guidellm in turns: how far the largest of the"
    " three is above the smallest (Baton / AIPerf / guidellm, medians of the runs).",
    rows=tuple(
        row
        for load in ("4 requests/s", "4 at a time")
        for row in (
            *(
                _agreement(load, f"{name}_{which}_ms", f"{what}, {said}")
                for name, what in _UNITS.items()
                for which, said in (("mean", "mean"), ("p50", "median"))
            ),
            *(_agreement(load, key, what) for key, what in _RATES.items()),
        )
    ),
)

AREAS = (Area(title="By other programs", sources=(AGREEMENT,)),)
