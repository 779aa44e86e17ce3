"""Does splitting pay here? `baton loadtest compare` on the demo model, long prompts.

Colocated nodes compute a prompt beside the outputs that they decode; split, no output waits for a
prompt. Both get the same requests and cores. This keeps what is compared; for the whole report run
`baton loadtest compare` itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import record_environment, write_results

MODEL = Path(__file__).resolve().parents[1] / "examples" / "demo_model"
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
    """Without single runs, and without where the model is."""
    kept = {name: document[name] for name in KEPT if name in document}
    if isinstance(up := kept.get("up"), dict):
        kept["up"] = {**up, "model": "examples/demo_model"}
    deployments = document["deployments"]
    assert isinstance(deployments, list)
    kept["deployments"] = [
        {name: value for name, value in one.items() if name != "runs"} for one in deployments
    ]
    return kept


def main() -> int:
    """Returns the exit code of `baton loadtest compare`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="some 3 minutes in place of 8")
    arguments = parser.parse_args()
    environment = record_environment()
    options = {"--up": str(MODEL), **LOAD, **(SHORT if arguments.short else WHOLE)}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        report = Path(folder) / "compare.json"
        words = [word for pair in {**options, "--json": str(report)}.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "baton", "loadtest", "compare", *words], check=False
        )
        if not report.exists():
            return done.returncode or 1
        document = json.loads(report.read_text(encoding="utf-8"))
    write_results("compare", environment, {**condense(document), "exit_code": done.returncode})
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
