"""Step profile: how long steps of prompt tokens take on this machine, measured before any request.

Each size is computed twice, because the first step may compile kernels or touch new memory. Refuses
to know: what the times are for. No tensor.
"""

from __future__ import annotations

import time
from typing import TypeAlias

from baton.api.sampling_params import SamplingParams
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.engine import Engine

_FEW_TOKENS = 64
# A start must not take much longer for it: on a slow machine the largest step is smaller.
_MOST_SECONDS = 0.5
_STRIDE = 7919  # a prime: ids all over the vocabulary, so that not one expert gets all tokens
_GREEDY = SamplingParams(temperature=0)

StepTimes: TypeAlias = tuple[tuple[int, float], ...]
"""Prompt tokens and seconds of steps."""


def measure_step_times(engine: Engine, *, pushes: bool) -> StepTimes:
    """Return (prompt tokens, seconds) of steps of 1, 64 and as many tokens as a chunk may have.

    Overwrites the last block of the KV memory and row 0; the engine must have no request.

    Args:
        pushes: measure steps whose layers are sent while the next ones are computed.
    """
    assert not engine.requests, "steps are measured before there are requests"
    config = engine.executor.config
    most = min(
        config.long_prefill_token_threshold, config.max_num_batched_tokens, engine.max_model_len - 1
    )
    few = min(_FEW_TOKENS, most)
    times = {tokens: _measure(engine, tokens, pushes=pushes) for tokens in sorted({1, few})}
    most = min(most, int(_MOST_SECONDS * few / times[few]))
    if most > few:
        times[most] = _measure(engine, most, pushes=pushes)
    engine.executor.rest()
    return tuple(times.items())


def _measure(engine: Engine, num_tokens: int, *, pushes: bool) -> float:
    hooks = StepHooks(after_layer=_ignore if pushes else None)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        engine.executor.submit(_plan(engine, num_tokens), hooks).wait()
        seconds = time.perf_counter() - started
    return seconds


def _plan(engine: Engine, num_tokens: int) -> StepPlan:
    """Plan a whole prompt in one step, all of whose KV lies in the last block."""
    spec, vocab_size = engine.kv_memory.spec, engine.model_config.vocab_size
    new = NewRow(0, "profile", _GREEDY, 0, num_tokens, frozenset(), [], is_drafted_for=False)
    num_blocks = -(-num_tokens // spec.block_size) * spec.num_groups
    return StepPlan(
        (new,),
        (NewBlocks(0, [engine.num_blocks - 1] * num_blocks),),
        [0, 0, num_tokens, num_tokens],
        [index * _STRIDE % vocab_size for index in range(num_tokens)],
    )


def _ignore(_: int) -> None:
    pass
