"""Rehearsal: compute a few small steps that sample in every way, before there are requests.

The first step that samples with filters, penalties, a grammar or logprobs runs code and touches
memory that no step before has used. So does the first decode step. Refuses to know: what steps cost
(`step_profile`), grammars, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.engine import Engine

_PROMPT_TOKENS = 8
_MAX_ROWS = 2  # a step of one request takes other ways than a step of several
_TOKEN = 1
# Ways through the sampler, each with a first token and a decode step.
_WAYS = (
    SamplingParams(temperature=0),
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(seed=0, repetition_penalty=1.1, presence_penalty=0.1, logit_bias=((1, 1.0),)),
    SamplingParams(temperature=0, logprobs=5, prompt_logprobs=1),
    SamplingParams(seed=0, structured_output=StructuredOutput(json_object=True)),
)


def rehearse(engine: Engine) -> None:
    """Compute a prompt and a decode step of one and of two requests, in each way of sampling.

    Overwrites the last block of the KV memory and the first rows; the engine must have no request.
    Call this on the thread that computes all steps.
    """
    assert not engine.requests, "steps are rehearsed before there are requests"
    config = engine.executor.config
    num_tokens = min(_PROMPT_TOKENS, config.max_num_batched_tokens, engine.max_model_len - 1)
    most = min(_MAX_ROWS, config.max_num_requests, config.max_num_batched_tokens // num_tokens)
    for params in _WAYS:
        for num_rows in range(1, most + 1):
            for plan in (
                _prompts(engine, params, num_rows, num_tokens),
                _decodes(params, num_rows, num_tokens),
            ):
                hooks = StepHooks(allowed_bits=_All(plan.constrained, engine))
                engine.executor.submit(plan, hooks).wait()
    engine.executor.rest()


class _All:
    """Allow every token to each constrained request; see `StepHooks.allowed_bits`."""

    def __init__(self, request_ids: tuple[str, ...], engine: Engine) -> None:
        self._request_ids = request_ids
        self._num_bytes = -(-engine.model_config.vocab_size // 8)

    def __call__(self) -> Mapping[str, list[NDArray[np.uint8]]]:
        bits = np.full(self._num_bytes, 0xFF, dtype=np.uint8)
        return {request_id: [bits] for request_id in self._request_ids}


def _prompts(engine: Engine, params: SamplingParams, num_rows: int, num_tokens: int) -> StepPlan:
    """Plan whole prompts, all of whose KV lies in the last block."""
    spec, token_ids = engine.kv_memory.spec, [_TOKEN] * num_tokens
    num_blocks = -(-(num_tokens + 1) // spec.block_size) * spec.num_groups
    looks_back = params.changes_logits or params.prompt_logprobs is not None
    known, stops = token_ids if looks_back else [], frozenset[int]()
    rows = range(num_rows)
    new_rows = [
        NewRow(row, _name(row), params, row, num_tokens, stops, known, is_drafted_for=False)
        for row in rows
    ]
    return StepPlan(
        tuple(new_rows),
        tuple(NewBlocks(row, [engine.num_blocks - 1] * num_blocks) for row in rows),
        [number for row in rows for number in (row, 0, num_tokens, num_tokens)],
        token_ids * num_rows,
        _constrained(params, num_rows),
    )


def _decodes(params: SamplingParams, num_rows: int, num_tokens: int) -> StepPlan:
    """Plan the step behind `_prompts`, of one more token for each request."""
    shares = [n for row in range(num_rows) for n in (row, num_tokens, 1, num_tokens + 1)]
    return StepPlan((), (), shares, [_TOKEN] * num_rows, _constrained(params, num_rows))


def _constrained(params: SamplingParams, num_rows: int) -> tuple[str, ...]:
    has_grammar = params.structured_output is not None
    return tuple(map(_name, range(num_rows))) if has_grammar else ()


def _name(row: int) -> str:
    return f"rehearsal-{row}"
