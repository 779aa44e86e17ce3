"""Compare lm-eval's results on a split Baton deployment with those on `transformers`.

Both sides read one GGUF file with the same tokenizer. Three small tasks (`lm_eval_tasks/`) use the
likelihoods of given answers and generated text over the completions API, and generated text over
the chat API. The results are accuracies, the largest difference of two log-likelihoods, and the
number of texts that differ.

    make lm-eval                      (or python -m benchmarks lm_eval_agreement --save)
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from baton.checkpoint.gguf.folder import folder_of_gguf
from baton.checkpoint.packaged_model import SMOLLM2
from benchmarks.runner.deployments import deployed
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run
from examples.demo import fetch_model
from tests.clients.environments import interpreter

SIDE = Path(__file__).with_name("lm_eval_side.py")
MOST_LOGPROB_DIFFERENCE = 1e-4


def run_side(python: Path, subject: str, gguf: str) -> dict[str, Any]:
    """Run lm-eval on one side, in lm-eval's environment; return samples and scores."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples.json"
        subprocess.run(
            [python, "-P", SIDE, subject, SMOLLM2.name, folder_of_gguf(Path(gguf)), gguf, output],
            cwd=ROOT,  # the tasks name their data files relative to this folder
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": folder,
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "OPENAI_API_KEY": "none",
            },
            check=True,
        )
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def through_baton(python: Path, gguf: str) -> dict[str, Any]:
    """Start a router and two nodes, and evaluate them.

    The decode node must not compute prompts.
    """
    with deployed(
        gguf,
        with_http=True,
        router_args=["--no-local-prefill", "--served-model-name", SMOLLM2.name],
        node_args=["--dtype", "float32", "--kv-cache-memory", "512M"],
    ) as deployment:
        return run_side(python, f"http://{deployment.config.http_listen}/v1", gguf)


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare one task sample by sample; raise ValueError if both sides' samples differ."""
    pairs = list(zip(ours["samples"], theirs["samples"], strict=True))
    if any(mine["id"] != other["id"] for mine, other in pairs):
        raise ValueError("the sides have other samples")
    found: dict[str, Any] = {
        "num_items": len(pairs),
        "baton": ours["scores"],
        "transformers": theirs["scores"],
        "num_judged_otherwise": sum(mine["judged"] != other["judged"] for mine, other in pairs),
    }
    if isinstance(pairs[0][0]["judged"][0], str):
        found["num_other_texts"] = sum(mine["answers"] != other["answers"] for mine, other in pairs)
        return found
    differences = [
        (abs(a - b), greedy_a != greedy_b)
        for mine, other in pairs
        for (a, greedy_a), (b, greedy_b) in zip(mine["judged"], other["judged"], strict=True)
    ]
    return found | {
        "num_judged_otherwise": sum(
            best(mine["judged"]) != best(other["judged"]) for mine, other in pairs
        ),
        "num_logprobs": len(differences),
        "largest_logprob_difference": max(difference for difference, _ in differences),
        "num_greedy_otherwise": sum(other for _, other in differences),
    }


def best(judged: list[tuple[float, bool]]) -> int:
    """Return the index of the most probable of the given answers."""
    return max(range(len(judged)), key=lambda index: judged[index][0])


def agrees(task: dict[str, Any]) -> bool:
    """Return whether both sides have equal results in a task, except for rounding."""
    same = task["baton"] == task["transformers"] and not task["num_judged_otherwise"]
    return same and task.get("largest_logprob_difference", 0.0) <= MOST_LOGPROB_DIFFERENCE


def run(run: Run) -> Document:
    """Evaluate both sides, and compare each sample."""
    gguf = fetch_model(run.console, SMOLLM2)
    if gguf is None:
        raise SystemExit("the model cannot be had")
    python = interpreter("lm-eval")
    theirs = run_side(python, "transformers", gguf)
    ours = through_baton(python, gguf)
    tasks = {name: compare(ours["tasks"][name], theirs["tasks"][name]) for name in theirs["tasks"]}
    run.show("task", tasks)
    run.problems += [f"{name}: they do not agree" for name in tasks if not agrees(tasks[name])]
    settings = {"model": SMOLLM2.requirement, "dtype": "float32", **theirs["versions"]}
    return {"settings": settings, "tasks": tasks}
