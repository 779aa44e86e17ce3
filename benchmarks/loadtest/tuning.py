"""Search for settings that beat the defaults, with `baton loadtest tune`, for three loads.

SmolLM2-135M-Instruct serves each load on this machine. The defaults should miss the SLO at the
load's rate, because otherwise nothing can be gained. A search continues where an earlier run
stopped (`build/tuning`). If a search finds settings, its file then starts a deployment with `baton
up --config`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from baton.checkpoint.packaged_model import SMOLLM2, fetch_packaged_model
from baton.options import make
from baton.processes.cores import usable_cores
from baton.processes.free_address import free_address
from benchmarks.runner.environment import ROOT
from benchmarks.runner.own_process import own_environment
from benchmarks.runner.run import Run
from benchmarks.served.served_servers import NAME, Job, Server, running
from loadtest.options import TuneOptions
from loadtest.tuning.execute_tuning import TuningJob, job_of, search
from loadtest.tuning.settings import described
from loadtest.tuning.tune import Trial, Tuning

BUILD = ROOT / "build" / "tuning"
LoadName = Literal["chats", "long prompts", "long answers"]
COMMON: dict[str, Any] = {
    "duration_s": 7.0,
    "warmup_s": 2.0,
    "arrivals": "constant",  # fewer chances, so fewer repeats show a gain
    "repeats": 3,  # with 2, the 95 % interval of a gain has 12.7 standard errors on each side
    "seed": 1,
    "max_lag_ms": 50.0,  # the load generator shares the cores with the deployment
}
LOADS: dict[LoadName, dict[str, Any]] = {
    "chats": {
        "turns": "4",
        "turn_pause_s": 0.3,
        "input_tokens": "80",
        "output_tokens": "32",
        "rate": 2.0,
        "slo": "ttft=0.3,tpot=0.02",
        "settings": "shape,speculative_method",
    },
    "long prompts": {
        "input_tokens": "800",
        "output_tokens": "16",
        "rate": 1.6,
        "slo": "ttft=1.2,tpot=0.05",
        "settings": "shape,prefill_tokens_beside_decodes",
    },
    "long answers": {
        "input_tokens": "32",
        "output_tokens": "96",
        "rate": 7.0,
        "slo": "ttft=0.5,tpot=0.02",
        "settings": "shape,speculative_method",
    },
}


def run(
    run: Run,
    loads: Sequence[LoadName] = ("chats", "long prompts", "long answers"),
    budget_s: float = 60.0,
) -> None:
    """Search for one load after another; other loads keep their earlier results.

    Args:
        loads: loads to search settings for.
        budget_s: seconds after which a search tries no further values.
    """
    found = run.saved().get("loads", {})
    for name in loads:
        found[name] = {"measured": dict(run.environment), **_measure(name, budget_s)}
        document = {"loads": {one: found[one] for one in LOADS if one in found}}
        run.save(document)
    run.judge(document)


def _measure(name: LoadName, budget_s: float) -> dict[str, Any]:
    """Search for one load, and start a deployment from the written file."""
    BUILD.mkdir(parents=True, exist_ok=True)
    what = json.dumps([COMMON, LOADS[name]], sort_keys=True).encode()
    # Trials of another rate or SLO say nothing about this load, so they are in another file
    place = BUILD / f"{name.replace(' ', '_')}-{hashlib.sha256(what).hexdigest()[:8]}"
    files = {"state": f"{place}.jsonl", "write": f"{place}.toml", "budget_s": budget_s}
    up = {"up": str(fetch_packaged_model(SMOLLM2))}
    job = job_of(make(TuneOptions, {**COMMON, **LOADS[name], **files, **up}))
    job.write.unlink(missing_ok=True)
    found = asyncio.run(search(job, asyncio.Event()))
    return {
        "load": LOADS[name],
        "default_goodput": found.default_goodput,
        "noise": found.noise,
        "best": found.best,
        "best_text": described(found.best),
        "wins": found.wins,
        "was_cut": found.was_cut,
        "gain": None if found.gain is None else dataclasses.asdict(found.gain),
        "trials": _trials(found),
        "starts": _starts(job) if found.wins else None,
    }


def _trials(found: Tuning) -> list[dict[str, Any]]:
    """Return all trials, each with the part of the search to which it belongs."""
    parts: dict[str, Sequence[Trial]] = {
        "defaults": found.defaults,
        "tried": [one.trial for one in found.tried],
        "defaults again": found.rivals,
        "best again": found.finals,
    }
    return [
        {"part": part, **dataclasses.asdict(trial)}
        for part, trials in parts.items()
        for trial in trials
    ]


def _starts(job: TuningJob) -> bool:
    """Return whether `baton up --config` with the written file answers a request."""

    def command(server: Job) -> list[str]:
        return [
            *(sys.executable, "-m", "baton", "up", "--model", job.up.model),
            *("--config", str(job.write.resolve()), "--served-model-name", NAME),
            *("--listen", free_address(), "--http-listen", server.address),
        ]

    server = Server(command, lambda _: own_environment())
    at = Job(job.write.parent, "auto", free_address(), tuple(sorted(usable_cores())))
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        try:
            with running(server, at, Path(folder) / "log"):
                return True
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return False
