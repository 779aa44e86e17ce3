"""Rows of docs/performance.md about embeddings, compared with other systems."""

from __future__ import annotations

from benchmarks.page.measures import value
from benchmarks.page.rows import Measurement, Row, Source, Subject


def _over(peer: str, case: str) -> Row:
    what = f"texts of {case}: tokens/s divided by {peer}'s"
    return Row(what, value(f"over_peers > {peer} > {case}", "{:.2f}"), ">= 1.2")


def _rate(system: str, case: str) -> Row:
    what = f"texts of {case}, {system}: tokens/s"
    return Row(what, value(f"tokens_per_second > {system} > {case}", "{:,.0f}"))


_CASES = ("64 tokens", "512 tokens")
POOLING = Source(
    "pooling",
    (
        *(_over("sentence-transformers", case) for case in _CASES),
        *(_over("llama.cpp's server", case) for case in _CASES),
        Row(
            "largest difference of a number from sentence-transformers'",
            value("most_difference", "{:.2g}"),
            "<= 0.00001",
        ),
        *(_rate("baton, router and prefill node", case) for case in _CASES),
    ),
    "A Qwen3 shape of 125 million random weights in float32, two threads. Baton in one process"
    " beside sentence-transformers; a router with one prefill node beside llama.cpp's server.",
    options="--peers sentence_transformers llamacpp",
    absent="no run was saved yet",
)
BESIDE = Source(
    "chats_beside",
    (
        Row(
            "chats' ITL p99 beside a full load of embeddings / ITL p99 of chats alone",
            value("ratios > itl_p99_ms", "{:.3f}"),
            "<= 1.05",
            "router and clients share the two cores with both nodes, and the prefill node leaves"
            " them less of its core while it embeds.",
        ),
        Row("ITL p50 of chats, beside embeddings / alone", value("ratios > itl_p50_ms", "{:.3f}")),
        Row(
            "TTFT p50 of chats, beside embeddings / alone", value("ratios > ttft_p50_ms", "{:.2f}")
        ),
        Row(
            "tokens embedded per second beside the chats",
            value("rounds > beside embeddings > 0 > embedded_tokens_per_s", "{:,.0f}"),
        ),
    ),
    "A router, a prefill node and a decode node, each node on one core; the model of the comparison"
    " above in bfloat16.",
    absent="no run was saved yet",
)
SUBJECT = Subject(
    "Embeddings",
    (
        Measurement("pooling.pooling", "engine router kernels/csrc", (POOLING,)),
        Measurement("pooling.chats_beside", "engine router prefill_node", (BESIDE,)),
    ),
)
