"""Measure the load generator on one core: its number of streams, lag, CPU time per token.

A router and simulated nodes run on one core, `baton loadtest run --concurrency N` on another. Each
stream gets a token every few milliseconds, depending on `--time-scale`. The result is the largest
number of streams at which the lag's p99 is below 5 ms.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner.programs import Programs, SimFleet
from benchmarks.runner.run import Document, Run

STREAMS = (500, 1000, 2000)
TARGET_LAG_MS = 5.0
INPUT_TOKENS = 16


def measure(address: str, core: int, streams: int, options: Options) -> dict[str, Any]:
    """Run a load of ``streams`` users; return the report's figures about the generator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        with Programs(core) as programs:
            programs.start(
                "generator",
                *("loadtest", "run", "--target", f"grpc://{address}", "--json", path),
                *("--concurrency", streams, "--warmup-s", options.warmup_s),
                *("--duration-s", options.warmup_s + options.seconds),
                *("--input-tokens", INPUT_TOKENS, "--output-tokens", options.output_tokens),
                *("--connections", options.connections, "--max-lag-ms", 1_000_000),
            )
            programs.processes["generator"].wait()
        document = json.loads(path.read_text(encoding="utf-8"))
    summary, where = document["summary"], document["environment"]
    lag = summary["lag"]
    tokens_per_s = summary["output_tokens_per_s"]
    cpu = where["generator_cpu_share"]
    frames = summary["latencies"]["frame_gap_s"]["count"]
    gaps = summary["latencies"]["itl_s"]["count"]
    return {
        "streams": streams,
        "output_tokens_per_s": round(tokens_per_s),
        "tokens_per_frame": round(gaps / frames, 2),
        "core_share": round(cpu, 2),
        "cpu_us_per_token": round(cpu / tokens_per_s * 1e6, 1) if tokens_per_s else None,
        "loop_lag_ms": {name: round(lag["loop"][name] * 1e3, 2) for name in ("p50", "p90", "p99")},
        "send_lag_p99_ms": round(lag["send"]["p99"] * 1e3, 2) if lag["send"] else None,
        "num_failed": sum(summary["errors"].values()),
        "num_checked": summary["tokens"]["num_checked"],
        "num_miscounted": summary["tokens"]["num_miscounted"],
        "load_average": where["load_average"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The load of each run.

    Attributes:
        streams: the number of streams of each run.
        seconds: length of each run's measured window in seconds.
    """

    streams: Sequence[int] = STREAMS
    seconds: float = 15.0
    warmup_s: float = 8.0
    time_scale: float = 30.0
    output_tokens: str = "uniform:30-90"
    connections: int = 1


def run(run: Run, options: Options) -> Document:
    """Measure the runs one after another."""
    cores = sorted(os.sched_getaffinity(0))
    scale, room = (
        ("--time-scale", options.time_scale),
        ("--http-listen", "", "--max-open-requests", "100000"),
    )
    with SimFleet(4, 12, *scale, router_words=room, core=cores[0]) as fleet:
        fleet.wait_ready()
        rows = [measure(fleet.address, cores[-1], one, options) for one in options.streams]
    run.show("runs", rows)
    held = [r["streams"] for r in rows if r["loop_lag_ms"]["p99"] < TARGET_LAG_MS]
    print(f"held with a loop lag p99 under {TARGET_LAG_MS:g} ms: {max(held, default=0)} streams")
    return {"time_scale": options.time_scale, "runs": rows}
