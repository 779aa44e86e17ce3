"""AIPerf: its command measures chats, completions and responses, with no request that failed."""

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


def check_report(system: System, kind: str, *options: str) -> dict[str, Any]:
    """Run AIPerf on one kind of endpoint; return its report."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("aiperf")), "profile", "--ui", "none"),
                *("--model", system.model, "--url", system.root_url, "--endpoint-type", kind),
                *("--streaming", "--tokenizer", system.tokenizer, "--artifact-dir", folder),
                *("--concurrency", "2", "--request-count", str(NUM_REQUESTS)),
                *("--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean"),
                *(str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
                *("--no-gpu-telemetry", "--no-server-metrics"),
                *options,
            ],
            check=True,
        )
        text = (Path(folder) / "profile_export_aiperf.json").read_text()
    report: dict[str, Any] = json.loads(text)
    assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
    assert not report.get("error_request_count")
    assert not report.get("error_summary")
    assert report["time_to_first_token"]["avg"] > 0
    assert report["inter_token_latency"]["avg"] > 0
    return report


def chats(system: System) -> None:
    check_report(system, "chat")


def chats_with_the_servers_count_of_tokens(system: System) -> None:
    report = check_report(system, "chat", "--use-server-token-count", "--per-chunk-usage")
    assert report["output_sequence_length"]["avg"] == OUTPUT_TOKENS


def completions(system: System) -> None:
    check_report(system, "completions")


def responses(system: System) -> None:
    check_report(system, "responses")


if __name__ == "__main__":
    run(
        chats,
        chats_with_the_servers_count_of_tokens,
        completions,
        responses,
    )
