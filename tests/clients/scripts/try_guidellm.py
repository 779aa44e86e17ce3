"""guidellm: its command measures chats, completions and responses, with no request that failed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import System, run

NUM_REQUESTS = 6
OUTPUT_TOKENS = 16


def measured(system: System, path: str) -> dict[str, Any]:
    """Run guidellm on a path of the API; return the only benchmark of its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        data = f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
                "--backend",
                f"kind=openai_http,target={system.root_url},model={system.model},"
                f"request_format={path}",
                *("--profile", "kind=concurrent,streams=2", "--data", data),
                *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=hf_auto,model={system.tokenizer}"),
                *("--output", f"kind=json,path={report}"),
            ],
            check=True,
        )
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    found: dict[str, Any] = benchmark["metrics"]
    return found


def check_report(system: System, path: str) -> None:
    metrics = measured(system, path)
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    told = metrics["output_token_count"]["successful"]
    assert told["mean"] == OUTPUT_TOKENS, told
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert metrics["inter_token_latency_ms"]["successful"]["mean"] > 0


def chats(system: System) -> None:
    check_report(system, "/v1/chat/completions")


def completions(system: System) -> None:
    check_report(system, "/v1/completions")


def responses(system: System) -> None:
    check_report(system, "/v1/responses")


if __name__ == "__main__":
    run(
        chats,
        completions,
        responses,
    )
