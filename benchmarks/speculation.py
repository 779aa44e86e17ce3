"""What guesses of next tokens save: tokens per second with and without, on a CPU, greedy, float32.

``ngram`` with SmolLM2-135M-Instruct, whose weights have 4 bits, as they are and in float32: this
repository's own files, code to be edited and prose to be summarised. Trained heads and layers, and
a draft model (its first four layers of six), with the demo model: functions that begin. Each
comparison is made in turns within one run, and told as a ratio of medians; outputs must be equal.
Beside them `transformers`' own prompt lookup and assisted generation over its plain generation, of
the same models.

    python benchmarks/speculation.py [--part PART]      a part is measured anew, the others stay
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from engine import LLM
from environment import record_environment, write_results
from examples.demo import fetch_model

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "baton/registry.py", "engine/core/extents.py", "engine/core/waiting_queue.py",
    "engine/worker/host/cores.py", "baton/addresses.py", "engine/executors/uniproc.py",
)  # fmt: skip
PROSE = ("docs/determinism.md", "docs/routing.md", "docs/security.md", "docs/chat.md")
EDIT = "Rename the first function of this file, and give back the whole file.\n\n```python\n{}\n```"
SUMMARISE = "Summarise this text in its own words, sentence by sentence.\n\n{}"
TASKS = {"editing code": (CODE, EDIT), "summarising": (PROSE, SUMMARISE)}
PROMPT_TOKENS = 400  # of a file
NUM_DRAFTS = 5  # the default; Medusa heads: as many as there are
DEMO = ROOT / "examples" / "demo_model"
PEERS = "transformers"
PARTS = (*TASKS, "medusa", "eagle", "mtp", "draft_model", PEERS)
BEGINNINGS = (
    "def read_config(path):\n",
    'class Stack:\n    """A simple stack."""\n',
    "import os\n\ndef main(",
    "    def __init__(self, name, value=None):\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        ratio: of tokens per second, with guesses over without.
        acceptance_length: tokens that a request got of a step with guesses.
        share_computed: steps' requests that had guesses computed, of all.
        step_cost: seconds of a step over one's without guesses, the guessing included.
        why: so many guesses were computed at the end, where they are chosen.
    """

    name: str
    batch: int
    tokens_per_s: float
    ratio: float
    acceptance_length: float
    share_computed: float
    step_cost: float
    equal: bool
    why: str = ""


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
    before, num_steps_before = guessing.metrics(), engine_steps(plain, guessing)
    speeds: dict[str, list[float]] = {"plain": [], "guessing": []}
    equal = True
    for _ in range(arguments.repetitions):
        speed, expected = timed(lambda: complete(plain))
        speeds["plain"].append(speed)
        speed, found = timed(lambda: complete(guessing))
        speeds["guessing"].append(speed)
        equal &= found == expected
    after = guessing.metrics()
    num_draft_steps = after.draft_steps_total - before.draft_steps_total
    num_accepted = after.accepted_drafts_total - before.accepted_drafts_total
    num_tokens = after.output_tokens_total - before.output_tokens_total
    ratio = statistics.median(speeds["guessing"]) / statistics.median(speeds["plain"])
    num_steps = [
        now - then
        for now, then in zip(engine_steps(plain, guessing), num_steps_before, strict=True)
    ]
    return Row(
        name=name,
        batch=batch,
        tokens_per_s=statistics.median(speeds["guessing"]),
        ratio=ratio,
        acceptance_length=1 + num_accepted / max(num_draft_steps, 1),
        share_computed=num_draft_steps / max(num_tokens - num_accepted, 1),
        step_cost=num_steps[0] / num_steps[1] / ratio,
        equal=equal,
        why=guessing.engine.why_drafts(),
    )


def engine_steps(*llms: LLM) -> list[int]:
    return [llm.engine.num_steps for llm in llms]


def load_peer(model: Path) -> Any:
    """A folder, or a GGUF file, by `transformers`."""
    where: dict[str, Any] = {"gguf_file": model.name} if model.is_file() else {}
    folder = model.parent if model.is_file() else model
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)


def compare_transformers(
    name: str, peer: Any, prompts: list[list[int]], arguments: argparse.Namespace, **guesses: Any
) -> Row:
    """`transformers` at batch 1, with guesses over without; prompts are computed, too."""

    def complete(**options: Any) -> list[tuple[int, ...]]:
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
    guessed, found = timed(lambda: complete(**guesses))
    return Row(
        name=f"transformers: {name}", batch=1, tokens_per_s=guessed, ratio=guessed / speed,
        acceptance_length=0.0, share_computed=0.0, step_cost=0.0, equal=found == expected,
    )  # fmt: skip


def first_layers(folder: Path, to: Path, num_layers: int) -> Path:
    """A model of a model's first layers, which guesses for it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = load_file(folder / "model.safetensors")
    gone = tuple(f"model.layers.{index}." for index in range(num_layers, 100))
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(gone)}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    return to


def compare_drafters(
    method: str, add: Callable[[Row], None], draft_model: Path, arguments: argparse.Namespace
) -> None:
    """A drafter with weights, of the demo model."""
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**28}
    plain = LLM(str(DEMO), **options)
    assert plain.tokenizer is not None
    prompts = [plain.tokenizer.encode(text) for text in BEGINNINGS[: arguments.prompts]]
    folder = draft_model if method == "draft_model" else DEMO / method
    guesses = {
        "speculative_method": method,
        "speculative_model": str(folder),
    }
    adaptive = LLM(str(DEMO), **options, **guesses)
    fixed = LLM(str(DEMO), **options, **guesses, adaptive_speculation=False)
    name = f"demo model, {method}"
    add(compare(f"{name}, as many as pay", plain, adaptive, prompts, 1, arguments))
    add(compare(f"{name}, all guesses", plain, fixed, prompts, 1, arguments))
    add(compare(f"{name}, as many as pay", plain, adaptive, prompts, 32, arguments))


def compare_ngram(
    task: str, add: Callable[[Row], None], model: Path, arguments: argparse.Namespace
) -> None:
    """Prompt lookup with SmolLM2."""
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**29}
    guesses: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    plain = LLM(str(model), **options)
    adaptive = LLM(str(model), **options, **guesses)
    fixed = LLM(str(model), **options, **guesses, adaptive_speculation=False)
    files, text = TASKS[task]
    prompts = prompts_of(plain, files[: arguments.prompts], text)
    add(compare(f"{task}, as many as pay", plain, adaptive, prompts, 1, arguments))
    add(compare(f"{task}, all guesses", plain, fixed, prompts, 1, arguments))
    add(compare(f"{task}, as many as pay", plain, adaptive, prompts, 32, arguments))
    # What `transformers` computes with, beside it: weights that take most of a step to read.
    del plain, adaptive, fixed
    options["weights"] = "fp32"
    plain, adaptive = LLM(str(model), **options), LLM(str(model), **options, **guesses)
    name = f"{task}, float32 weights, as many as pay"
    add(compare(name, plain, adaptive, prompts, 1, arguments))


def compare_peers(
    add: Callable[[Row], None], model: Path, draft_model: Path, arguments: argparse.Namespace
) -> None:
    """`transformers` with the same models, weights in float32."""
    reader = LLM(str(model), dtype="float32", kv_cache_bytes=2**26)
    peer, guesses = load_peer(model), {"prompt_lookup_num_tokens": NUM_DRAFTS}
    for task, (files, text) in TASKS.items():
        prompts = prompts_of(reader, files[: arguments.prompts], text)
        add(compare_transformers(task, peer, prompts, arguments, **guesses))
    reader = LLM(str(DEMO), dtype="float32", kv_cache_bytes=2**26)
    assert reader.tokenizer is not None
    prompts = [reader.tokenizer.encode(text) for text in BEGINNINGS[: arguments.prompts]]
    peer, assistant = load_peer(DEMO), load_peer(draft_model)
    assistant.generation_config.num_assistant_tokens = NUM_DRAFTS
    given = {"assistant_model": assistant}
    add(compare_transformers("demo model, assisted", peer, prompts, arguments, **given))
    guesses = {"prompt_lookup_num_tokens": NUM_DRAFTS}
    add(compare_transformers("demo model, prompt lookup", peer, prompts, arguments, **guesses))


def measure(part: str, console: Console, arguments: argparse.Namespace) -> list[Row]:
    """The rows of a part."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        console.print(row)

    found = fetch_model(console, SMOLLM2)
    if found is None:
        raise SystemExit("the model cannot be had")
    with tempfile.TemporaryDirectory() as made:
        draft_model = first_layers(DEMO, Path(made), 4)
        if part in TASKS:
            compare_ngram(part, add, Path(found), arguments)
        elif part == PEERS:
            compare_peers(add, Path(found), draft_model, arguments)
        else:
            compare_drafters(part, add, draft_model, arguments)
    return rows


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(
        "", "batch", "tokens/s", "ratio", "acceptance length", "with guesses", "step cost", "equal"
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.name, str(row.batch), f"{row.tokens_per_s:.1f}", f"{row.ratio:.2f}",
            f"{row.acceptance_length:.2f}", f"{row.share_computed:.2f}", f"{row.step_cost:.2f}",
            str(row.equal),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Compare, print, write the JSON."""
    parser = argparse.ArgumentParser(description="What guesses of next tokens save, on a CPU.")
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given several times")
    parser.add_argument("--tokens", type=int, default=128, help="of an output")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    arguments = parser.parse_args()
    environment = record_environment()
    console = Console(highlight=False)
    written = ROOT / "benchmarks" / "results" / "speculation.json"
    parts = json.loads(written.read_text(encoding="utf-8"))["parts"] if written.exists() else {}
    for part in arguments.part or PARTS:
        now = {key: environment[key] for key in ("date", "git_revision", "cpu", "load_average")}
        rows = measure(part, console, arguments)
        show(console, rows)
        parts[part] = {"measured": now, "rows": [asdict(row) for row in rows]}
        parts = {part: parts[part] for part in PARTS if part in parts}
        write_results("speculation", environment, {"parts": parts})


if __name__ == "__main__":
    main()
