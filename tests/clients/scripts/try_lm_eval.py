"""lm-eval: its command scores given answers and generates text, by completions and by chat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import System, run

ROOT = Path(__file__).parents[3]
NUM_ITEMS = 8


def scores(system: System, kind: str, path: str, task: str, *options: str) -> dict[str, float]:
    """Run a task's first items on a path of the API; return the task's results."""
    url = f"{system.base_url}/{path}"
    arguments = f"model={system.model},base_url={url},tokenizer={system.tokenizer},num_concurrent=2"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("lm_eval")), "run", "--model", kind),
                *("--model_args", arguments, "--tasks", task, "--limit", str(NUM_ITEMS)),
                *("--include_path", "benchmarks/loadtest/lm_eval_tasks"),
                *("--output_path", folder, *options),
            ],
            cwd=ROOT,  # the tasks name their data from here
            env={**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"},
            check=True,
        )
        (report,) = Path(folder).rglob("results_*.json")
        document = json.loads(report.read_text())
    assert document["n-samples"][task]["effective"] == NUM_ITEMS, document["n-samples"]
    found: dict[str, float] = document["results"][task]
    return found


def log_likelihoods(system: System) -> None:
    found = scores(system, "local-completions", "completions", "baton_choice")
    assert 0 <= found["acc,none"] <= 1


def completions(system: System) -> None:
    found = scores(system, "local-completions", "completions", "baton_generation")
    assert found["exact_match,last_word"] > 0


def chats(system: System) -> None:
    chat = ("local-chat-completions", "chat/completions", "baton_chat", "--apply_chat_template")
    assert scores(system, *chat)["exact_match,last_word"] >= 0


if __name__ == "__main__":
    run(
        log_likelihoods,
        completions,
        chats,
    )
