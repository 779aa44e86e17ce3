"""Train a LoRA adapter for the demo model with PEFT, in minutes on two cores.

The adapter teaches a habit that is easy to see: every function begins with the docstring ``Made by
the adapter.``. The training text is the standard library's functions with this docstring::

    python examples/train_adapter.py --output adapters/habit
    python - <<'END'
    from baton import LLM
    llm = LLM("examples/demo_model", adapters={"habit": "adapters/habit"})
    print(llm.generate("def read_config(path):", adapter="habit")[0].text)
    END

Needs ``pip install peft transformers``.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
import transformers

DOCSTRING = '"""Made by the adapter."""'
NUM_TOKENS = 96  # number of tokens of a training text
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="examples/demo_model", help="the base model's folder")
    parser.add_argument("--output", required=True, type=Path, help="the adapter's folder")
    parser.add_argument("--steps", default=150, type=int)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--rank", default=16, type=int)
    parser.add_argument("--seed", default=0, type=int)
    options = parser.parse_args()
    train(
        options.model,
        options.output,
        num_steps=options.steps,
        batch_size=options.batch_size,
        rank=options.rank,
        seed=options.seed,
    )


def train(
    model: str, output: Path, *, num_steps: int, batch_size: int, rank: int, seed: int = 0
) -> None:
    """Train an adapter and save it in PEFT's layout.

    Args:
        model: folder of the base model.
        output: folder of the adapter.
        num_steps: number of the optimizer's steps.
        batch_size: number of texts per step.
        rank: rank of the adapter in all layers.
    """
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, lora)
    rows = token_rows(tokenizer, seed, num_steps * batch_size)
    optimizer = torch.optim.AdamW(
        [one for one in adapted.parameters() if one.requires_grad], lr=2e-3, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_steps)
    for step in range(num_steps):
        batch = torch.tensor([next(rows) for _ in range(batch_size)])
        loss = adapted(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    adapted.save_pretrained(str(output), save_embedding_layers=False)
    print(f"saved in {output}")


def token_rows(
    tokenizer: transformers.PreTrainedTokenizerBase, seed: int, num_rows: int
) -> Iterator[list[int]]:
    """Yield rows of ``NUM_TOKENS`` tokens, each cut from a few functions one after another."""
    texts = list(functions())
    draw = random.Random(seed)
    row: list[int] = []
    while num_rows:
        row += tokenizer.encode(draw.choice(texts) + "\n\n\n", add_special_tokens=False)
        if len(row) >= NUM_TOKENS:
            yield row[:NUM_TOKENS]
            row, num_rows = [], num_rows - 1


def functions() -> Iterator[str]:
    """Yield the standard library's functions, each with `DOCSTRING` as its docstring."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.decorator_list:
                continue
            first = node.body[1:] if ast.get_docstring(node) is not None else node.body
            head = lines[node.lineno - 1].strip()
            if not (first and head.endswith(":")):
                continue
            body = "\n".join(lines[first[0].lineno - 1 : node.end_lineno])
            yield f"{head}\n    {DOCSTRING}\n{textwrap.indent(textwrap.dedent(body), '    ')}"


if __name__ == "__main__":
    main()
