"""Measure tokens per second with and without speculation, on a CPU, with greedy sampling.

Prompt lookup (``ngram``) runs with SmolLM2-135M-Instruct, with its 4-bit weights and with float32
weights, on files of this repository: code to edit and prose to summarise. Trained drafters run with
the demo model, which completes the beginnings of functions; so does a draft model that consists of
the demo model's first four layers (of six). Engines with and without drafts take turns in one run
and must give equal outputs; the result is the ratio of their median speeds. For comparison,
`transformers` runs with prompt lookup and with assisted generation, each relative to its plain
generation with the same model.

    python -m benchmarks speculation [--part PART]      measure a part, keep the others' results
"""

from __future__ import annotations

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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Run
from engine import LLM
from examples.demo import fetch_model

CODE = (
    "baton/registry.py", "engine/step_stretch.py", "engine/core/waiting_room.py",
    "engine/worker/host/cores.py", "baton/addresses.py", "engine/executors/uniproc.py",
)  # fmt: skip
PROSE = ("docs/determinism.md", "docs/routing.md", "docs/security.md", "docs/chat.md")
EDIT = "Rename the first function of this file, and give back the whole file.\n\n```python\n{}\n```"
SUMMARISE = "Summarise this text in its own words, sentence by sentence.\n\n{}"
TASKS = {"editing code": (CODE, EDIT), "summarising": (PROSE, SUMMARISE)}
PROMPT_TOKENS = 400  # from each file
NUM_DRAFTS = 5  # default number of drafts; Medusa has one draft per head
DEMO = ROOT / "examples" / "demo_model"
PEERS = "transformers"
PARTS = (*TASKS, "medusa", "eagle", "mtp", "draft_model", PEERS)
BEGINNINGS = (
    "def read_config(path):\n",
    'class Stack:\n    """A simple stack."""\n',
    "import os\n\ndef main(",
    "    def __init__(self, name, value=None):\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure: output tokens, repetitions, and prompts of each kind."""

    tokens: int
    repetitions: int
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison of an engine with drafts and an engine without.

    Attributes:
        ratio: tokens per second with drafts, divided by tokens per second without drafts.
        acceptance_length: mean number of tokens that a step with checked drafts adds to a
            request.
        share_computed: share of (step, request) pairs in which drafts were checked.
        step_cost: mean time of a step with drafts, divided by the mean time without drafts.
        why: the engine's reason for its last choice of the number of drafts; empty: the number is
            fixed.
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
    """Return a chat prompt per file: ``text`` and a quotation of the file's beginning."""
    assert llm.tokenizer is not None
    found = []
    for name in files:
        content = (ROOT / name).read_text(encoding="utf-8")
        beginning = llm.tokenizer.decode(llm.tokenizer.encode(content)[:PROMPT_TOKENS])
        message = {"role": "user", "content": text.format(beginning)}
        found.append(llm.tokenizer.encode_chat([message]))
    return found


def beginnings(llm: LLM, options: Options) -> list[list[int]]:
    """Return prompts that are the beginnings of functions."""
    assert llm.tokenizer is not None
    return [llm.tokenizer.encode(text) for text in BEGINNINGS[: options.prompts]]


def timed(run: Callable[[], list[tuple[int, ...]]]) -> tuple[float, list[tuple[int, ...]]]:
    """Run a call that generates text; return its tokens per second and its outputs."""
    started = time.monotonic()
    outputs = run()
    return sum(map(len, outputs)) / (time.monotonic() - started), outputs


def compare(
    name: str, plain: LLM, drafting: LLM, prompts: list[list[int]], batch: int, options: Options
) -> Row:
    """Complete prompts with both engines in turns; return the comparison."""
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
    prompts = [prompts[index % len(prompts)] for index in range(max(batch, len(prompts)))]

    def complete(llm: LLM) -> list[tuple[int, ...]]:
        outputs = []
        for first in range(0, len(prompts), batch):
            outputs += llm.generate(prompts[first : first + batch], params)
        return [output.token_ids for output in outputs]

    complete(plain)  # fills the prefix cache, so that only decoding is timed
    complete(drafting)
    before, num_steps_before = drafting.metrics(), engine_steps(plain, drafting)
    speeds: dict[str, list[float]] = {"plain": [], "drafting": []}
    equal = True
    for _ in range(options.repetitions):
        speed, expected = timed(lambda: complete(plain))
        speeds["plain"].append(speed)
        speed, found = timed(lambda: complete(drafting))
        speeds["drafting"].append(speed)
        equal &= found == expected
    after = drafting.metrics()
    num_draft_steps = after.draft_steps_total - before.draft_steps_total
    num_accepted = after.accepted_drafts_total - before.accepted_drafts_total
    num_tokens = after.output_tokens_total - before.output_tokens_total
    ratio = statistics.median(speeds["drafting"]) / statistics.median(speeds["plain"])
    num_steps = [
        now - then
        for now, then in zip(engine_steps(plain, drafting), num_steps_before, strict=True)
    ]
    return Row(
        name=name,
        batch=batch,
        tokens_per_s=statistics.median(speeds["drafting"]),
        ratio=ratio,
        acceptance_length=1 + num_accepted / max(num_draft_steps, 1),
        share_computed=num_draft_steps / max(num_tokens - num_accepted, 1),
        step_cost=num_steps[0] / num_steps[1] / ratio,
        equal=equal,
        why=drafting.engine.features.why_drafts(),
    )


def engine_steps(*llms: LLM) -> list[int]:
    return [llm.engine.num_steps for llm in llms]


def load_peer(model: Path) -> Any:
    """Load a model folder or GGUF file with `transformers`."""
    where: dict[str, Any] = {"gguf_file": model.name} if model.is_file() else {}
    folder = model.parent if model.is_file() else model
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)


def compare_transformers(
    name: str, peer: Any, prompts: list[list[int]], options: Options, **drafts: Any
) -> Row:
    """Compare `transformers` with and without drafts, for one request at a time.

    The times include the prefills.
    """

    def complete(**drafts: Any) -> list[tuple[int, ...]]:
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = peer.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=options.tokens, max_new_tokens=options.tokens, **drafts,
            )  # fmt: skip
            outputs.append(tuple(made[0, len(prompt) :].tolist()))
        return outputs

    speed, expected = timed(complete)
    drafted, found = timed(lambda: complete(**drafts))
    return Row(
        name=f"transformers: {name}", batch=1, tokens_per_s=drafted, ratio=drafted / speed,
        acceptance_length=0.0, share_computed=0.0, step_cost=0.0, equal=found == expected,
    )  # fmt: skip


def first_layers(folder: Path, to: Path, num_layers: int) -> Path:
    """Write a draft model that consists of the first layers of a model."""
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
    method: str, add: Callable[[Row], None], draft_model: Path, options: Options
) -> None:
    """Measure a drafter that has weights, with the demo model."""
    of_engine: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**28}
    plain = LLM(str(DEMO), **of_engine)
    prompts = beginnings(plain, options)
    folder = draft_model if method == "draft_model" else DEMO / method
    drafts = {"speculative_method": method, "speculative_model": str(folder)}
    adaptive = LLM(str(DEMO), **of_engine, **drafts)
    fixed = LLM(str(DEMO), **of_engine, **drafts, adaptive_speculation=False)
    name = f"demo model, {method}"
    add(compare(f"{name}, as many as pay", plain, adaptive, prompts, 1, options))
    add(compare(f"{name}, all drafts", plain, fixed, prompts, 1, options))
    add(compare(f"{name}, as many as pay", plain, adaptive, prompts, 32, options))


def compare_ngram(task: str, add: Callable[[Row], None], model: Path, options: Options) -> None:
    """Measure prompt lookup with SmolLM2 on one task, such as editing code."""
    of_engine: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**29}
    drafts: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    plain = LLM(str(model), **of_engine)
    adaptive = LLM(str(model), **of_engine, **drafts)
    fixed = LLM(str(model), **of_engine, **drafts, adaptive_speculation=False)
    files, text = TASKS[task]
    prompts = prompts_of(plain, files[: options.prompts], text)
    add(compare(f"{task}, as many as pay", plain, adaptive, prompts, 1, options))
    add(compare(f"{task}, all drafts", plain, fixed, prompts, 1, options))
    add(compare(f"{task}, as many as pay", plain, adaptive, prompts, 32, options))
    # With float32 weights (as in `transformers`), reading the weights takes most of a step.
    del plain, adaptive, fixed
    of_engine["weights"] = "fp32"
    plain, adaptive = LLM(str(model), **of_engine), LLM(str(model), **of_engine, **drafts)
    name = f"{task}, float32 weights, as many as pay"
    add(compare(name, plain, adaptive, prompts, 1, options))


def compare_peers(
    add: Callable[[Row], None], model: Path, draft_model: Path, options: Options
) -> None:
    """Measure `transformers` with the same models, weights in float32."""
    reader = LLM(str(model), dtype="float32", kv_cache_bytes=2**26)
    peer, drafts = load_peer(model), {"prompt_lookup_num_tokens": NUM_DRAFTS}
    for task, (files, text) in TASKS.items():
        prompts = prompts_of(reader, files[: options.prompts], text)
        add(compare_transformers(task, peer, prompts, options, **drafts))
    prompts = beginnings(LLM(str(DEMO), dtype="float32", kv_cache_bytes=2**26), options)
    peer, assistant = load_peer(DEMO), load_peer(draft_model)
    assistant.generation_config.num_assistant_tokens = NUM_DRAFTS
    given = {"assistant_model": assistant}
    add(compare_transformers("demo model, assisted", peer, prompts, options, **given))
    drafts = {"prompt_lookup_num_tokens": NUM_DRAFTS}
    add(compare_transformers("demo model, prompt lookup", peer, prompts, options, **drafts))


def measure(part: str, console: Console, options: Options) -> list[Row]:
    """Measure the rows of one part, and return them."""
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
            compare_ngram(part, add, Path(found), options)
        elif part == PEERS:
            compare_peers(add, Path(found), draft_model, options)
        else:
            compare_drafters(part, add, draft_model, options)
    return rows


def run(
    run: Run, part: Sequence[str] = PARTS, tokens: int = 128, repetitions: int = 3, prompts: int = 4
) -> None:
    """Measure the chosen parts one after another; other parts keep their earlier results.

    Args:
        part: some of editing code, summarising, medusa, eagle, mtp, draft_model, transformers.
        tokens: number of output tokens per request.
        prompts: number of prompts of each kind.
    """
    options = Options(tokens, repetitions, prompts)
    parts = run.saved().get("parts", {})
    environment = run.environment
    for name in part:
        now = {key: environment[key] for key in ("date", "git_revision", "cpu", "load_average")}
        rows = [asdict(row) for row in measure(name, run.console, options)]
        run.show(name, rows)
        parts[name] = {"measured": now, "rows": rows}
        parts = {one: parts[one] for one in PARTS if one in parts}
        run.save({"parts": parts})
