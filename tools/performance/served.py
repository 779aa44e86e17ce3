"""Rows about serving over HTTP beside other servers, under another's load generator."""

from __future__ import annotations

from tools.performance.rows import Found, Json, Row, Source, at, number

_SHAPES = {"125M": "125M, float32", "0.6B": "0.6B, bfloat16"}
_RATES = ("1", "4")
_SATURATION = "4"
_COLUMNS = {
    "output_tokens_per_s": "throughput",
    "ttft_p50_ms": "TTFT p50",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
}
_LARGER_IS_BETTER = {"output_tokens_per_s"}
MOST_ITL_OF_COLOCATED = 0.25


def over_best_peer(servers: Json, shape: str, column: str) -> float:
    """Divide a shape's median by the best peer's; raises one of `NOT_THERE`."""
    of_peers = [
        number(row, column) for name, row in servers.items() if not name.startswith("baton")
    ]
    best = max(of_peers) if column in _LARGER_IS_BETTER else min(of_peers)
    return number(servers, shape, column) / best


def is_better(column: str, ratio: float) -> bool:
    """Judge whether a ratio to a peer is a gain."""
    return ratio > 1 if column in _LARGER_IS_BETTER else ratio < 1


def best_shape(servers: Json) -> str:
    """Choose the shape of Baton that beats the peers in most columns, then the fastest one."""

    def rank(shape: str) -> tuple[int, float]:
        gains = sum(is_better(key, over_best_peer(servers, shape, key)) for key in _COLUMNS)
        return gains, number(servers, shape, "output_tokens_per_s")

    shapes: list[str] = [name for name in servers if name.startswith("baton")]
    return max(shapes, key=rank)


def _beside_peers(shape: str, rate: str, column: str) -> Row:
    def measure(document: Json) -> Found:
        servers = at(document, "shapes", shape, "medians", rate)
        own = best_shape(servers)
        ratio = over_best_peer(servers, own, column)
        values = ", ".join(f"{name} {number(row, column):.4g}" for name, row in servers.items())
        failed = sum(number(row, "num_failed") for row in servers.values())
        told = f"; {failed:.0f} failed" if failed else ""
        return Found(f"{ratio:.2f} ({own}: {values}{told})", is_better(column, ratio))

    return Row(
        what=f"{_SHAPES[shape]}, {rate}/s: {_COLUMNS[column]}, best shape of Baton / best peer",
        target="> 1" if column in _LARGER_IS_BETTER else "< 1",
        measure=measure,
        holds_back=_WHY_OTHERS_ARE_AHEAD,
    )


_WHY_OTHERS_ARE_AHEAD = (
    "where no server is full all answer as many as arrive, and the colocated shape, which is the"
    " best in most rows, decodes as fast as llama.cpp there; split decodes faster."
)
_WHY_SPLIT_IS_BEHIND = (
    "both nodes write a prompt's KV into memory that nobody had had, and few requests decode at a"
    " time; see the log."
)


def _of_colocated(shape: str, rate: str, column: str) -> Row:
    def measure(document: Json) -> Found:
        servers = at(document, "shapes", shape, "medians", rate)
        split, both = (number(servers, f"baton {kind}", column) for kind in ("split", "colocated"))
        ratio = split / both
        more = column in _LARGER_IS_BETTER
        text = f"{ratio:.2f} ({split:.4g} / {both:.4g})"
        return Found(text, ratio >= 1 if more else ratio <= MOST_ITL_OF_COLOCATED)

    more = column in _LARGER_IS_BETTER
    return Row(
        what=f"{_SHAPES[shape]}, {rate}/s: {_COLUMNS[column]}, split / colocated",
        target=">= 1" if more else f"<= {MOST_ITL_OF_COLOCATED:g}",
        measure=measure,
        holds_back=_WHY_SPLIT_IS_BEHIND if more else "",
    )


SERVED = Source(
    name="served",
    command="benchmarks/served.py --save",
    intro="`vllm bench serve`, 512 tokens in, 64 out, Poisson arrivals, against each server in turn"
    " on the same two cores, which the generator shares: medians of the rounds (output tokens/s,"
    " ms). The best shape of Baton is, at each rate, the one that beats the peers in most rows.",
    rows=tuple(
        row
        for shape in _SHAPES
        for row in (
            *(_beside_peers(shape, rate, column) for rate in _RATES for column in _COLUMNS),
            _of_colocated(shape, _SATURATION, "output_tokens_per_s"),
            _of_colocated(shape, "1", "itl_p99_ms"),
        )
    ),
)
