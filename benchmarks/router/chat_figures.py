"""Figures of the chats of `chat_places`: medians of a shape, and ratios between shapes.

Refuses to know: deployments, how turns are sent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.router.chat_peer import PEER
from benchmarks.router.chat_turns import LATER, Measured

FETCH = "+fetch"  # ending of a shape
# A node caches whole blocks, and computes at least the last token. So a node may compute this many
# tokens in addition to the new ones.
ROUNDING_TOKENS = 32
Figures = Mapping[str, Any]


def summarize(runs: Sequence[Measured], num_turns: int) -> dict[str, Any]:
    """Summarize all runs of a shape."""
    rows = [row for one in runs for row in one.rows]
    later = [row for row in rows if row.turn >= min(LATER, num_turns)]
    alone = [row for row in later if row.place.startswith("-")]
    new = [row.num_prompt - row.num_reusable for row in later]

    def ttft_ms(turn: int) -> float:
        return statistics.median(row.ttft_ms for row in rows if row.turn == turn)

    def part_ms(name: str) -> float:
        return statistics.median(row.parts.get(name, 0.0) for row in later)

    num_output = sum(row.num_output for row in rows)
    return {
        "ttft_p50_later_ms": round(statistics.median(row.ttft_ms for row in later), 1),
        "computed_per_later_turn": round(statistics.fmean(row.num_computed for row in later), 1),
        "new_per_later_turn": round(statistics.fmean(new), 1),
        "fetched_per_later_turn": round(statistics.fmean(row.num_fetched for row in later), 1),
        "output_tokens_per_s": round(num_output / sum(one.seconds for one in runs), 1),
        "later_turns": len(later),
        "later_turns_alone": len(alone),
        # Earlier answers were computed again, or their text was tokenized in another way.
        "later_turns_with_more_than_new": sum(
            row.num_computed > num_new + ROUNDING_TOKENS
            for row, num_new in zip(later, new, strict=True)
        ),
        "gap_p50_ms": round(statistics.median(row.gap_p50_ms for row in rows), 2),
        "gap_max_p50_ms": round(statistics.median(row.gap_max_ms for row in rows), 1),
        "ttft_p50_turn_4_ms": round(ttft_ms(min(LATER, num_turns)), 1),
        "ttft_p50_last_turn_ms": round(ttft_ms(num_turns), 1),
        "ttft_parts_p50_later_ms": {
            name: round(part_ms(name), 1)
            for name in dict.fromkeys(name for row in later for name in row.parts)
        },
    }


def ratios(results: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the ratios of shapes with fetches to those without, and of all shapes to the peer."""
    pairs = [(name, name.removesuffix(FETCH)) for name in results if name.endswith(FETCH)]
    pairs += [(name, PEER) for name in results if name != PEER]
    return {
        f"{name} / {other}": _ratio(results[name], results[other])
        for name, other in pairs
        if other in results
    }


def _ratio(ours: Figures, others: Figures) -> dict[str, float]:
    """Compare two shapes.

    The bounds are those of a load that only computes prompts, without any wait. The time to the
    first token is then proportional to the computed tokens, and the throughput inversely
    proportional. Shorter queues may lower the ratio of the times further. Decodes take time, too,
    so the throughput rises less.
    """
    new, computed = ours["new_per_later_turn"], others["computed_per_later_turn"]
    return {
        "ttft_p50_later": round(ours["ttft_p50_later_ms"] / others["ttft_p50_later_ms"], 3),
        "ttft_without_waits_at_least": round(min(new / computed, 1.0), 3),
        "output_tokens_per_s": round(
            ours["output_tokens_per_s"] / others["output_tokens_per_s"], 3
        ),
        "output_tokens_per_s_at_most": round(max(computed / new, 1.0), 3),
        "computed_per_later_turn": round(ours["computed_per_later_turn"] / computed, 3),
        "gap_p50": round(ours["gap_p50_ms"] / others["gap_p50_ms"], 3),
    }


def transpose(rows: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """Return a table with a row for each figure, and a column for each shape."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return {
        name: {shape: row[name] for shape, row in rows.items() if name in row}
        for name in names
        if not any(isinstance(row.get(name), Mapping) for row in rows.values())
    }


def show(console: Console, shape: str, measured: Measured) -> None:
    """Print a line per turn, with the terms of each place in whole milliseconds."""
    console.print(f"[bold]{shape}[/], {measured.seconds:.1f} s")
    for row in sorted(measured.rows, key=lambda row: (row.turn, row.session)):
        console.print(
            f"turn {row.turn} of {row.session}: {row.place}; prompt {row.num_prompt}, cached "
            f"{row.num_cached} ({row.num_fetched} fetched), computed {row.num_computed}, chat so "
            f"far {row.num_reusable}; TTFT {row.ttft_ms:.0f} ms, expected {row.expected_ms:.0f}, "
            f"measured {row.measured_ms:.0f}"
        )
        for name, terms in (("fetch", row.fetch), *row.places.items(), ("parts", row.parts)):
            parts = ", ".join(
                f"{term.removesuffix('_ms').replace('_', ' ')} {value:.0f}"
                for term, value in terms.items()
            )
            if parts:
                console.print(f"    {name}: {parts}", style="dim", soft_wrap=True)
