"""Step profile: measures the times of steps on this machine, before any request arrives.

Each step is computed twice, because the first run may compile kernels or touch new memory. On a
CPU, where nothing is compiled, a long step is computed only once, because touching new memory is a
small part of its time. Refuses to know: what the times are used for, tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.api.sampling_params import SamplingParams
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.engine import Engine

_FEW_TOKENS = 64
# Maximum seconds of one step to measure, which limits the time spent at the start: on a slow
# machine, smaller steps are measured.
_MOST_SECONDS = 0.25
_LONG_S = 0.1
# Multiplies positions or row numbers to get token ids: a prime spreads the ids over the vocabulary,
# so that no expert gets all tokens.
_STRIDE = 7919
_GREEDY = SamplingParams(temperature=0)
_NO_HOOKS = StepHooks()
_MANY_REQUESTS = 32
_SHORT_CONTEXT, _LONG_CONTEXT = 64, 4096
# A step of prompt tokens behind a context gets a shorter context if it would take longer than this.
_MOST_CONTEXT_SECONDS = 1.0
_LEAST_S = 1e-6


def measure_step_times(
    engine: Engine, *, pushes: bool, compiles: bool = True
) -> tuple[tuple[int, float], ...]:
    """Measure steps of 1 and 64 prompt tokens and of a full chunk; return (tokens, seconds) pairs.

    Overwrites the last block of the KV memory and row 0; the engine must have no request.

    Args:
        pushes: whether to measure steps as they run if each layer's KV is sent while later layers
            are computed.
        compiles: whether a first computation may compile kernels.
    """
    assert not engine.requests, "steps are measured before there are requests"
    config = engine.executor.config
    most = min(
        config.long_prefill_token_threshold, config.max_num_batched_tokens, engine.max_model_len - 1
    )
    few = min(_FEW_TOKENS, most)
    times = {
        tokens: _measure(engine, tokens, pushes=pushes, compiles=compiles)
        for tokens in sorted({1, few})
    }
    most = min(most, int(_MOST_SECONDS * few / times[few]))
    if most > few:
        times[most] = _measure(engine, most, pushes=pushes, compiles=compiles)
    engine.executor.rest()
    return tuple(times.items())


def measure_context_times(
    engine: Engine,
    step_times: Sequence[tuple[int, float]],
    *,
    pushes: bool,
    compiles: bool = True,
) -> tuple[tuple[int, int, float], ...]:
    """Measure the largest step again behind a context; return (tokens, context tokens, seconds).

    The difference between both times is the time of attention to the context. First, the context
    has as many tokens as the step, or as many as have room. Attention takes time in proportion to
    the context, so this time tells how many context tokens are affordable, at most 4,096. Returns
    nothing if there is room for less than half as many context tokens as tokens.

    Overwrites the last block of the KV memory and row 0; the engine must have no request.

    Args:
        step_times: what `measure_step_times` returned.
        pushes, compiles: as in `measure_step_times`.
    """
    assert not engine.requests, "steps are measured before there are requests"
    num_tokens, alone_s = step_times[-1]
    most_context = min(max(_LONG_CONTEXT, num_tokens), engine.max_model_len - 1 - num_tokens)
    if len(step_times) < 2 or most_context < num_tokens / 2:
        return ()

    def measure(num_context_tokens: int) -> float:
        return _measure(engine, num_tokens, num_context_tokens, pushes=pushes, compiles=compiles)

    num_context_tokens = min(num_tokens, most_context)
    seconds = measure(num_context_tokens)
    added_s = max(seconds - alone_s, _LEAST_S)
    affordable = (_MOST_CONTEXT_SECONDS - alone_s) / added_s * num_context_tokens
    if min(affordable, most_context) > num_context_tokens:
        num_context_tokens = int(min(affordable, most_context))
        seconds = measure(num_context_tokens)
    engine.executor.rest()
    return ((num_tokens, num_context_tokens, seconds),)


def measure_decode_times(
    engine: Engine, *, compiles: bool = True
) -> tuple[tuple[int, int, float], ...]:
    """Measure decode steps; return (requests, total context tokens, seconds) of each.

    Measures one request, many requests, and one request with a long context. Overwrites the last
    block of the KV memory and the first rows; the engine must have no request. Call this after
    `measure_step_times`, which fills that block with valid numbers.

    Args:
        compiles: whether a first computation may compile kernels.
    """
    assert not engine.requests, "steps are measured before there are requests"
    config = engine.executor.config
    most_context = engine.max_model_len - 2
    short, long = min(_SHORT_CONTEXT, most_context), min(_LONG_CONTEXT, most_context)
    alone_s = _time(engine, _decode_plan(engine, 1, short), compiles=compiles)
    times = [(1, short, alone_s)]
    # On a slow machine, measure fewer requests: a request in a batch takes at most as long as a
    # request alone.
    num_affordable = int(2 * _MOST_SECONDS / alone_s)
    many = min(_MANY_REQUESTS, config.max_num_requests, num_affordable)
    if many > 1:
        many_s = _time(engine, _decode_plan(engine, many, short), compiles=compiles)
        times.append((many, many * short, many_s))
    if long > short:
        long_s = _time(engine, _decode_plan(engine, 1, long), compiles=compiles)
        times.append((1, long, long_s))
    engine.executor.rest()
    return tuple(times)


def _measure(
    engine: Engine, num_tokens: int, num_context_tokens: int = 0, *, pushes: bool, compiles: bool
) -> float:
    hooks = StepHooks(after_layer=_ignore if pushes else None)
    return _time(engine, _plan(engine, num_tokens, num_context_tokens), hooks, compiles=compiles)


def _time(engine: Engine, plan: StepPlan, hooks: StepHooks = _NO_HOOKS, *, compiles: bool) -> float:
    """Compute a step twice, or only once if it is long; return the seconds of the last run."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        engine.executor.submit(plan, hooks).wait()
        seconds = time.perf_counter() - started
        if seconds > _LONG_S and not compiles:
            break
    return seconds


def _decode_plan(engine: Engine, num_requests: int, num_context_tokens: int) -> StepPlan:
    """Plan a step with one token per request; all requests read the KV of the last block."""
    rows = range(num_requests)
    return StepPlan(
        tuple(_new_row(row, num_context_tokens) for row in rows),
        tuple(_all_in_last_block(engine, row, num_context_tokens + 1) for row in rows),
        [n for row in rows for n in (row, num_context_tokens, 1, num_context_tokens + 1)],
        [row * _STRIDE % engine.model_config.vocab_size for row in rows],
    )


def _new_row(row: int, num_prompt_tokens: int) -> NewRow:
    name = f"profile {row}"
    return NewRow(row, name, _GREEDY, 0, num_prompt_tokens, frozenset(), [])


def _all_in_last_block(engine: Engine, row: int, num_tokens: int) -> NewBlocks:
    spec = engine.kv_memory.spec
    num_blocks = -(-num_tokens // spec.block_size) * spec.num_groups
    return NewBlocks(row, [engine.num_blocks - 1] * num_blocks)


def _plan(engine: Engine, num_tokens: int, num_context_tokens: int) -> StepPlan:
    """Plan one step with a prompt's last tokens; all its KV is in the last block.

    Args:
        num_context_tokens: number of the prompt's earlier tokens.
    """
    num_prompt_tokens = num_context_tokens + num_tokens
    return StepPlan(
        (_new_row(0, num_prompt_tokens),),
        (_all_in_last_block(engine, 0, num_prompt_tokens),),
        [0, num_context_tokens, num_tokens, num_prompt_tokens],
        [index * _STRIDE % engine.model_config.vocab_size for index in range(num_tokens)],
    )


def _ignore(_: int) -> None:
    pass
