"""Compare split with colocated nodes by `baton loadtest compare`, with long prompts.

The nodes serve the demo model. Colocated nodes compute prompts in the same steps as outputs; with
split nodes, no output waits for a prompt. Both deployments get the same requests and cores. Only
the compared figures are kept; for the whole report, run `baton loadtest compare` itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run

KEPT = ("plan", "up", "repeats", "was_stopped", "verdict", "verdict_text")
LOAD = {
    "--rate": "3",
    "--input-tokens": "1500",
    "--output-tokens": "200",
    "--vocab-size": "4000",
    "--slo": "ttft=2,gap=0.05",
    "--node-args": "--dtype float32",
    "--warmup-s": "5",
}
WHOLE = {"--duration-s": "45", "--repeats": "4", "--deployments": "colocated:2,1:1"}
SHORT = {"--duration-s": "35", "--repeats": "2", "--deployments": "colocated:2,1:1"}


def condense(document: dict[str, object]) -> dict[str, object]:
    """Return the report's document without its single runs and the model's path."""
    kept = {name: document[name] for name in KEPT if name in document}
    if isinstance(up := kept.get("up"), dict):
        kept["up"] = {**up, "model": "examples/demo_model"}
    deployments = document["deployments"]
    assert isinstance(deployments, list)
    kept["deployments"] = [
        {name: value for name, value in one.items() if name != "runs"} for one in deployments
    ]
    return kept


def run(run: Run, short: bool = False) -> None:
    """Compare the deployments; nothing is saved if the command writes no report.

    Args:
        short: whether to run about 3 minutes, in place of 8.
    """
    options = {"--up": str(DEMO_MODEL), **LOAD, **(SHORT if short else WHOLE)}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        report = Path(folder) / "compare.json"
        words = [word for pair in {**options, "--json": str(report)}.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "baton", "loadtest", "compare", *words], check=False
        )
        if done.returncode:
            run.problems.append(f"exit code {done.returncode} of the load test")
        if not report.exists():
            return
        document = json.loads(report.read_text(encoding="utf-8"))
    found = {**condense(document), "exit_code": done.returncode}
    run.judge(found, "compare")
    run.save(found, "compare")
