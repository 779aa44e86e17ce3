"""Count how many of a million sampled tokens a different rounding of the logits changes.

Part one adds noise of 3e-7 times each logit, which is about the effect of another order of a
float32 sum. It compares Baton's sampler with sampling by the inverse cumulative distribution in
float64. Part two runs the same requests with two schedules: large steps, and small chunks with
preemptions.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.api.sampling_params import SamplingParams
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Document, Run
from engine import LLM
from engine.executors.uniproc import worker_of
from engine.sampling.gumbel import TokenIds, Words, draw
from models.base import AdapterSpan

MODEL = str(DEMO_MODEL)
TEMPERATURE = 0.9
RELATIVE_NOISE = 3e-7
NUM_ROWS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 64
SCHEDULES: tuple[dict[str, int], ...] = (
    {"max_num_batched_tokens": 4096, "long_prefill_token_threshold": 4096, "num_blocks": 1000},
    {
        "max_num_requests": 16,
        "max_num_batched_tokens": 48,
        "long_prefill_token_threshold": 24,
        "num_blocks": 80,
    },
)

Draw = Callable[[Tensor, npt.NDArray[np.float64], Words], TokenIds]


def invert(logits: Tensor, temperatures: npt.NDArray[np.float64], keys: Words) -> TokenIds:
    """Draw a token per row by the inverse cumulative distribution of one uniform number."""
    values = logits.numpy() / temperatures[:, None]
    cumulative = np.exp(values - values.max(axis=1, keepdims=True)).cumsum(axis=1)
    uniforms = (keys[:, 0] + keys[:, 1] * 2.0**-32) * 2.0**-32
    drawn: TokenIds = (cumulative > (uniforms * cumulative[:, -1])[:, None]).argmax(axis=1)
    return drawn


def changed_by_noise(method: Draw, logits: Tensor, num_draws: int) -> int:
    """Return how many drawn tokens change when noise is added to the logits."""
    random_numbers = np.random.default_rng(0)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    rounded = logits + logits * noise * RELATIVE_NOISE
    temperatures = np.full(NUM_ROWS, TEMPERATURE)
    num_changed = 0
    for step in range(num_draws // NUM_ROWS):
        first = step * NUM_ROWS % len(logits)
        rows = slice(first, first + NUM_ROWS)
        keys = random_numbers.integers(0, 2**32, (NUM_ROWS, 2), dtype=np.uint32)
        drawn = method(logits[rows], temperatures, keys)
        num_changed += int((drawn != method(rounded[rows], temperatures, keys)).sum())
    return num_changed


def run_schedule(options: dict[str, int], num_requests: int) -> list[tuple[int, ...]]:
    """Complete random prompts with an engine that has these options; return the outputs."""
    return complete(LLM(MODEL, dtype="float32", num_threads=1, **options), num_requests)


def complete(llm: LLM, num_requests: int) -> list[tuple[int, ...]]:
    """Complete random prompts; return the outputs' token ids."""
    numbers = random.Random(0)
    prompts = [numbers.choices(range(4000), k=PROMPT_TOKENS) for _ in range(num_requests)]
    params = [
        SamplingParams(
            temperature=TEMPERATURE, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=seed
        )
        for seed in range(num_requests)
    ]
    return [tuple(completion.token_ids) for completion in llm.generate(prompts, params)]


def compare_schedules(num_requests: int) -> dict[str, int]:
    """Count the draws up to each request's first difference, and the requests that differ."""
    outputs = [run_schedule(options, num_requests) for options in SCHEDULES]
    num_draws = num_changed = 0
    for first, second in zip(*outputs, strict=True):
        equal = [a == b for a, b in zip(first, second, strict=True)]
        differs = not all(equal)
        num_draws += equal.index(False) + 1 if differs else len(equal)
        num_changed += differs
    return {"draws": num_draws, "changed": num_changed}


def demo_logits(num_rows: int) -> Tensor:
    """Collect the demo model's logits while it completes random prompts."""
    llm = LLM(MODEL, dtype="float32", num_threads=1, **SCHEDULES[0])
    model = worker_of(llm.engine.executor).runner._model
    collected: list[Tensor] = []
    compute_logits = model.compute_logits

    def keep(hidden_states: Tensor, adapters: tuple[AdapterSpan, ...] = ()) -> Tensor:
        collected.append(compute_logits(hidden_states, adapters))
        return collected[-1]

    model.compute_logits = keep  # type: ignore[assignment, method-assign]
    complete(llm, num_rows // OUTPUT_TOKENS)
    return torch.cat(collected).clone()


def run(run: Run, draws: int = 1_000_000, requests: int = 1000) -> Document:
    """Count changed draws.

    Args:
        draws: number of draws from distributions over 4,096 tokens.
        requests: number of requests per schedule.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    sources = {
        "demo model": demo_logits(2048),
        "flat, 4096 tokens": torch.randn(256, 4096, generator=generator),
        "flat, 151936 tokens": torch.randn(NUM_ROWS, 151_936, generator=generator),
    }
    results: dict[str, dict[str, int]] = {}
    methods: dict[str, tuple[Draw, float]] = {
        "Gumbel-max": (draw, 1.0),
        # a tenth of the draws, because this method is slow, but many of its draws change
        "inverse transform": (invert, 0.1),
    }
    for source, logits in sources.items():
        for method_name, (method, share) in methods.items():
            num_draws = int(share * draws * 4096 / logits.shape[1])
            num_draws -= num_draws % NUM_ROWS
            num_changed = changed_by_noise(method, logits, num_draws)
            results[f"{source}, {method_name}"] = {"draws": num_draws, "changed": num_changed}
    results["two schedules, Gumbel-max"] = compare_schedules(requests)
    run.show("logits and method", results)
    return {"results": results}
