"""Judges the figures of served_rows.py: medians, Baton's ratios to the best peer, goals.

Refuses to know: how figures are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Numbers = dict[str, float]
Rows = Mapping[str, Mapping[str, Numbers]]  # row -> server -> figures by name

COLOCATED, SPLIT, LLAMACPP = "baton colocated", "baton split", "llamacpp"
SHAPES = (COLOCATED, SPLIT)
CHAT_TURN = 4
TURN_KEY = f"turn_{CHAT_TURN}_ttft_p50_ms"
# Figures that are compared with peers; larger is better only for the last of them.
COMPARED = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", TURN_KEY, "tokens_per_s")
MORE_IS_BETTER = {"tokens_per_s"}

LEAST_OF_PEERS = 1.0
MOST_ITL_OF_SPLIT = 1.05
MOST_TURN_OF_COLOCATED = 1.2
MOST_FIRST_OF_TENTH = 1.3
MOST_START_OF_LLAMACPP = 4.0
MOST_MEMORY_OF_LLAMACPP = 1.5
_SHOWN_LOSSES = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal, the measured figure, and whether the goal is met.

    Attributes:
        holds: whether the goal is met; None: the figure was not measured.
    """

    goal: str
    text: str
    holds: bool | None

    @property
    def word(self) -> str:
        return {True: "holds", False: "MISSED", None: "not measured"}[self.holds]


def median_of(runs: Sequence[Numbers]) -> Numbers:
    """Return each figure's median over the rounds, but the sum of the errors."""
    keys = dict.fromkeys(key for run in runs for key in run)
    found = {key: statistics.median(run[key] for run in runs if key in run) for key in keys}
    if "num_errors" in found:
        found["num_errors"] = sum(run.get("num_errors", 0) for run in runs)
    return {key: round(value, 3) for key, value in found.items()} | {"rounds": len(runs)}


def gain(key: str, own: float, other: float) -> float:
    """Return how many times better Baton's figure is; above 1 means better for every key."""
    better, worse = (own, other) if key in MORE_IS_BETTER else (other, own)
    return round(better / worse, 3)


def ratios(rows: Rows) -> dict[str, dict[str, Numbers]]:
    """Compare each of Baton's shapes with the best peer; return ratios by row, shape and figure.

    In a row in which a server has errors, the server is not compared with Baton.
    """
    found: dict[str, dict[str, Numbers]] = {}
    for row, servers in rows.items():
        peers = [
            numbers
            for name, numbers in servers.items()
            if name not in SHAPES and not numbers.get("num_errors")
        ]
        for shape in SHAPES:
            own = servers.get(shape, {})
            gains = {
                key: min(gain(key, own[key], one[key]) for one in peers if key in one)
                for key in COMPARED
                if key in own and any(key in one for one in peers)
            }
            if gains:
                found.setdefault(row, {})[shape] = gains
    return found


def judge(rows: Rows, starts: Mapping[str, Numbers], alone: Sequence[str]) -> list[Verdict]:
    """Judge all goals.

    Args:
        starts: medians of the figures of each server's starts.
        alone: names of the rows with a single stream of completions.
    """
    return [
        *_beside_peers(rows),
        *_errors(rows),
        *_itl_alone(rows, alone),
        _chat(rows),
        *_starts(starts),
    ]


def _beside_peers(rows: Rows) -> Iterator[Verdict]:
    found = ratios(rows)
    for shape in SHAPES:
        gains = [
            (value, f"{key.removesuffix('_ms')} of {row}")
            for row, shapes in found.items()
            for key, value in shapes.get(shape, {}).items()
        ]
        lost = sorted(one for one in gains if round(one[0], 2) < LEAST_OF_PEERS)
        worst = ", ".join(f"{value:.2f} {what}" for value, what in lost[:_SHOWN_LOSSES])
        text = f"{len(lost)} of {len(gains)} below" + (f": {worst}" if lost else "")
        goal = f"{shape}: no ratio to the best peer below {LEAST_OF_PEERS:.1f}"
        yield Verdict(goal, text if gains else "no peer", not lost if gains else None)


def _errors(rows: Rows) -> Iterator[Verdict]:
    for shape in SHAPES:
        mine = [servers[shape] for servers in rows.values() if shape in servers]
        errors, requests = (
            sum(one[f"num_{key}"] for one in mine) for key in ("errors", "requests")
        )
        text = f"{errors:.0f} in rows of {requests:.0f} requests"
        yield Verdict(f"{shape}: no errors", text, not errors if mine else None)


def _itl_alone(rows: Rows, alone: Sequence[str]) -> Iterator[Verdict]:
    for row in alone:
        if row not in rows:
            continue
        goal = f"{row}: ITL p50 of colocated <= {MOST_ITL_OF_SPLIT:g} x split"
        yield _quotient(goal, rows[row], COLOCATED, SPLIT, "itl_p50_ms", MOST_ITL_OF_SPLIT)


def _chat(rows: Rows) -> Verdict:
    goal = f"chat: TTFT of turn {CHAT_TURN}, split <= {MOST_TURN_OF_COLOCATED:g} x colocated"
    servers = rows.get("chat", {})
    return _quotient(goal, servers, SPLIT, COLOCATED, TURN_KEY, MOST_TURN_OF_COLOCATED)


def _starts(starts: Mapping[str, Numbers]) -> Iterator[Verdict]:
    for shape in SHAPES:
        goal = f"{shape}: first prompt <= {MOST_FIRST_OF_TENTH:g} x tenth"
        ratio = starts.get(shape, {}).get("first_over_tenth")
        known = ratio is not None
        yield Verdict(
            goal,
            f"{ratio:.2f}" if known else "-",
            ratio <= MOST_FIRST_OF_TENTH if ratio is not None else None,
        )
        for what, key, most in (
            ("start", "start_s", MOST_START_OF_LLAMACPP),
            ("memory after load", "load_mib", MOST_MEMORY_OF_LLAMACPP),
        ):
            goal = f"{shape}: {what} <= {most:g} x llama.cpp's"
            yield _quotient(goal, starts, shape, LLAMACPP, key, most)


def _quotient(
    goal: str, servers: Mapping[str, Numbers], over: str, under: str, key: str, most: float
) -> Verdict:
    """Judge a goal about the figure of one server divided by the figure of another."""
    one, other = servers.get(over, {}).get(key), servers.get(under, {}).get(key)
    if one is None or not other:
        return Verdict(goal, "-", None)
    return Verdict(goal, f"{one / other:.2f} ({one:.4g} / {other:.4g})", one / other <= most)
