"""Runs lm-eval for one side of lm_eval_agreement.py, and writes the samples to a file.

    python lm_eval_side.py (URL | transformers) NAME MODEL_FOLDER FILE.gguf OUTPUT.json

The script runs with the Python of lm-eval's environment, and imports nothing from Baton. Both sides
use the tokenizer and chat template in MODEL_FOLDER, which Baton has made from the GGUF file,
because the tokenizer that transformers makes from this file splits texts differently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"
BATCH_SIZE = 8
MAX_LENGTH = 2048


def server_models(url: str, name: str, folder: str) -> dict[str, Any]:
    """Return lm-eval's model objects for the served model, one per API."""
    common: dict[str, Any] = {"model": name, "num_concurrent": 4, "max_length": MAX_LENGTH}
    completions = LocalCompletionsAPI(
        base_url=f"{url}/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        batch_size=BATCH_SIZE,
        **common,
    )
    chat = LocalChatCompletion(base_url=f"{url}/chat/completions", **common)
    return {"completions": completions, "chat": chat}


def transformers_models(folder: str, gguf: str) -> dict[str, Any]:
    """Load the model once, in float32; return it for both APIs, completions and chat."""
    import torch
    import transformers

    path = Path(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    both = HFLM(
        pretrained=model.eval(),
        tokenizer=tokenizer,
        backend="causal",
        device="cpu",
        # With several prompts, padding would make results depend on the other prompts
        batch_size=1,
        max_length=MAX_LENGTH,
    )
    return {"completions": both, "chat": both}


def evaluate(model: Any, tasks: list[str], *, is_chat: bool) -> dict[str, Any]:
    """Evaluate the tasks; return scores and samples by task."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=is_chat,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    return {
        task: {
            "scores": {
                name.partition(",")[0]: value
                for name, value in found["results"][task].items()
                if isinstance(value, float) and "stderr" not in name
            },
            "samples": [
                {
                    "id": sample["doc_id"],
                    "answers": sample["resps"],
                    "judged": sample["filtered_resps"],
                }
                for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
            ],
        }
        for task in tasks
    }


def main() -> None:
    subject, name, folder, gguf, output = sys.argv[1:]
    if subject == "transformers":
        models = transformers_models(folder, gguf)
    else:
        models = server_models(subject, name, folder)
    results = evaluate(models["completions"], ["baton_choice", "baton_generation"], is_chat=False)
    results |= evaluate(models["chat"], ["baton_chat"], is_chat=True)
    versions = {"lm_eval": lm_eval.__version__}
    document = {"versions": versions, "tasks": results}
    Path(output).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
