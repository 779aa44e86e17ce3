"""Chats over three hosts: which prefixes nodes fetch, how fast, and what the router expected.

A client, a router, a prefill node and two decode nodes run on hosts of their own, which are network
namespaces of this machine (Linux, root, iproute2). The decode nodes write the answers, which the
prefill node needs for the next turn: it fetches them, or computes them again. Over fast links,
fetches must take the time that the router expected. Over slow links, nothing may be fetched.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton import AsyncClient, SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from benchmarks.hosts.slow_link import wait_for_pairs
from benchmarks.router.chat_turns import LATER, Chats, Load, Turn
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Document, Run
from examples.demo import fetch_model
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

NODES = ("p0", "d0", "d1")
HOSTS = ("client", "router", *NODES)
NODE_WORDS = ("--fetch-prefixes", "--num-blocks", "1500")
# Longer than any fetch here, so that the measured time is the time of the whole fetch
LONGEST_FETCH_S = "4"


def measure(
    network: Network, gguf: Path, rate: float, load: Load, connector: str
) -> Sequence[Turn]:
    """Start all programs with links of this rate in Mbit/s; play all chats, return their turns."""

    async def play(router: str, admin: Any) -> Sequence[Turn]:
        async with AsyncClient(router) as client:
            for word in ("warm", "up", "now"):
                await client.generate(word, SamplingParams(max_tokens=8))
            return (await Chats(client, admin, load, seed=0).play()).rows

    with HostPrograms(network) as programs:
        programs.start_router("--policy", "cost", "--no-local-prefill", model=gguf)
        for name in NODES:
            network.limit(name, rate * 1e6)
            listen = ["--kv-listen", network.at(name, 0)] if connector == "tls" else []
            words = [*NODE_WORDS, "--fetch-timeout-s", LONGEST_FETCH_S, *listen]
            programs.start_node(name, *words, "--kv-connector", connector, model=gguf)
        wait_for_pairs(programs, 2)
        with admin_of(programs.router) as admin:
            return asyncio.run(play(programs.router, admin))


def summarize(rows: Sequence[Turn]) -> dict[str, Any]:
    """Summarize the turns from the fourth on; the first fetches of a pair teach the router."""
    later = [row for row in rows if row.turn >= LATER]
    fetched = [row.fetch for row in later if row.num_fetched]
    # The router expects the part of a fetch beyond the reader's queue.
    errors = [one["measured_ms"] / one["fetch_ms"] - 1 for one in fetched if one["fetch_ms"] > 0]
    return {
        "later_turns": len(later),
        "turns_with_a_source": sum(row.num_sources > 0 for row in later),
        "turns_with_a_fetch": len(fetched),
        "fetches_faster_than_computing": sum(
            one["measured_ms"] < one["compute_ms"] for one in fetched
        ),
        "fetches_lost": sum(row.fetch.get("lost", 0) for row in rows),
        "error_p50": round(statistics.median(map(abs, errors)), 3) if errors else None,
        "measured_over_expected_p50": round(1 + statistics.median(errors), 3) if errors else None,
        "computed_per_later_turn": round(statistics.fmean(row.num_computed for row in later), 1),
        "new_per_later_turn": round(
            statistics.fmean(row.num_prompt - row.num_reusable for row in later), 1
        ),
        "ttft_p50_later_ms": round(statistics.median(row.ttft_ms for row in later), 1),
    }


def show(run: Run, rate: float, rows: Sequence[Turn]) -> None:
    """Print a line per turn."""
    for row in sorted(rows, key=lambda row: (row.turn, row.session)):
        parts = ", ".join(f"{name} {value:.1f}" for name, value in row.fetch.items())
        run.console.print(
            f"{rate:g} Mbit/s, turn {row.turn} of {row.session}: {row.place}; prompt "
            f"{row.num_prompt}, fetched {row.num_fetched}, computed {row.num_computed}; "
            f"TTFT {row.ttft_ms:.0f} ms; {parts or 'no fetch'}"
        )


def run(
    run: Run,
    rates: Sequence[float] = (1000.0, 20.0),
    sessions: int = 2,
    turns: int = 8,
    words: int = 80,
    output_tokens: int = 120,
    connector: str = "nixl",
) -> Document | None:
    """Chat over links of each rate.

    Args:
        rates: Mbit/s of the nodes' links.
        sessions: chats at the same time.
        turns: turns per chat.
        words: number of words of a user's message.
        output_tokens: maximum number of tokens of an answer.
        connector: nixl or tls.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    gguf = fetch_model(run.console, SMOLLM2)
    if gguf is None:
        raise SystemExit("the model cannot be had")
    load = Load(sessions=sessions, turns=turns, words=words, output_tokens=output_tokens)
    results = {}
    with Network(HOSTS, ["ipv4"]) as network:
        network.enter("client")  # before gRPC starts threads, which keep their network
        for rate in rates:
            rows = measure(network, Path(gguf), rate, load, connector)
            show(run, rate, rows)
            results[f"{rate:g}"] = summarize(rows)
    return {
        "load": {
            "sessions": sessions, "turns": turns, "words": words, "output_tokens": output_tokens,
        },
        "connector": connector,
        "mbit_per_s": results,
    }  # fmt: skip
