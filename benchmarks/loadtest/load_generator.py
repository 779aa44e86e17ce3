"""Measure how many streams the load generator holds on one core, its lag and CPU per token.

A router and simulated nodes on one core, `baton loadtest run --concurrency N` on another. The nodes
make a token about every so many milliseconds for each stream, by `--time-scale`. Says what is held
with a lag p99 under 5 ms, and what is not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.processes.free_address import free_address
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run

MODEL = "examples/demo_model"
STREAMS = (500, 1000, 2000)
NUM_PREFILL, NUM_DECODE = 4, 12
TARGET_LAG_MS = 5.0
INPUT_TOKENS = 16


def start(core: int, *words: str) -> subprocess.Popen[bytes]:
    """Start `baton` with these arguments on one core, and drop its log."""
    return subprocess.Popen(
        [sys.executable, "-m", "baton", *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
            ),
        },
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextmanager
def server(core: int, time_scale: float) -> Iterator[str]:
    """Run a router with simulated nodes; yield its address once it answers."""
    address = free_address()
    router = ("router", "--model", MODEL, "--listen", address, "--max-open-requests", "100000")
    nodes = ("--prefill", str(NUM_PREFILL), "--decode", str(NUM_DECODE))
    scale = ("--time-scale", f"{time_scale:g}")
    sim = ("sim-node", "--model", MODEL, "--router", address, *nodes, *scale)
    children = [start(core, *router), start(core, *sim)]
    try:
        load = (
            "--num-requests",
            "1",
            "--concurrency",
            "1",
            "--input-tokens",
            "8",
            "--output-tokens",
            "2",
        )
        for _ in range(30):
            ready = start(core, "loadtest", "run", "--target", f"grpc://{address}", *load)
            if ready.wait(120) == 0:
                break
            time.sleep(1)
        else:
            raise SystemExit("the simulated deployment does not answer")
        yield address
    finally:
        for child in reversed(children):
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait(30)


def measure(address: str, core: int, streams: int, options: Options) -> dict[str, Any]:
    """Run one load of ``streams`` users; return what its report says of the generator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        child = start(
            core,
            *("loadtest", "run", "--target", f"grpc://{address}", "--json", str(path)),
            *("--concurrency", str(streams), "--warmup-s", str(options.warmup_s)),
            *("--duration-s", str(options.warmup_s + options.seconds)),
            *("--input-tokens", str(INPUT_TOKENS), "--output-tokens", options.output_tokens),
            *("--connections", str(options.connections), "--max-lag-ms", "1000000"),
        )
        child.wait()
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
        streams: number of streams, for each run.
        seconds: measured time of each run.
    """

    streams: Sequence[int] = STREAMS
    seconds: float = 15.0
    warmup_s: float = 8.0
    time_scale: float = 30.0
    output_tokens: str = "uniform:30-90"
    connections: int = 1


def run(run: Run, options: Options) -> Document:
    """Measure one run after the other."""
    cores = sorted(os.sched_getaffinity(0))
    with server(cores[0], options.time_scale) as address:
        rows = [measure(address, cores[-1], streams, options) for streams in options.streams]
    run.show("runs", rows)
    held = [r["streams"] for r in rows if r["loop_lag_ms"]["p99"] < TARGET_LAG_MS]
    print(f"held with a loop lag p99 under {TARGET_LAG_MS:g} ms: {max(held, default=0)} streams")
    return {"time_scale": options.time_scale, "runs": rows}
