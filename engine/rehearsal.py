"""Rehearsal: computes small steps with each sampling feature before requests arrive.

The first decode step, and the first step with filters, penalties, a grammar or logprobs, are slow:
they load code and touch new memory. Refuses to know: step times (`step_profile`), grammars,
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine.core.step_plan import NewBlocks, NewRow, StepHooks, StepPlan
from engine.engine import Engine

_PROMPT_TOKENS = 8
_TOKEN = 1
# One request per sampling feature; a step samples as many of these requests together as fit.
_GREEDY = SamplingParams(temperature=0)
_WAYS = (
    _GREEDY,
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(seed=0, repetition_penalty=1.1, presence_penalty=0.1, logit_bias=((1, 1.0),)),
    SamplingParams(temperature=0, logprobs=5, prompt_logprobs=1),
    SamplingParams(seed=0, structured_output=StructuredOutput(json_object=True)),
)


def rehearse(engine: Engine, *, decodes: bool = True) -> None:
    """Compute the prompt and one decode of a greedy request, then of a request per feature.

    Overwrites the last block of the KV memory and the first rows of the batch; the engine must have
    no request. Call this on the thread that computes all steps.

    Args:
        decodes: whether to compute decodes, too; False for an engine that will only compute
            prompts.
    """
    assert not engine.requests, "steps are rehearsed before there are requests"
    config = engine.executor.config
    num_tokens = min(_PROMPT_TOKENS, config.max_num_batched_tokens, engine.max_model_len - 1)
    most = min(config.max_num_requests, config.max_num_batched_tokens // num_tokens)
    batches = [(_GREEDY,), *(_WAYS[start : start + most] for start in range(0, len(_WAYS), most))]
    for batch in batches:
        steps = [_prompts(engine, batch, num_tokens)]
        steps += [_decodes(batch, num_tokens)] if decodes else []
        for plan in steps:
            hooks = StepHooks(allowed_bits=_All(plan.constrained, engine))
            engine.executor.submit(plan, hooks).wait()
    engine.executor.rest()


class _All:
    """A mask function that lets every constrained request sample any token.

    See `StepHooks.allowed_bits`.
    """

    def __init__(self, request_ids: tuple[str, ...], engine: Engine) -> None:
        self._request_ids = request_ids
        self._num_bytes = -(-engine.model_config.vocab_size // 8)

    def __call__(self) -> Mapping[str, list[NDArray[np.uint8]]]:
        bits = np.full(self._num_bytes, 0xFF, dtype=np.uint8)
        return {request_id: [bits] for request_id in self._request_ids}


def _prompts(engine: Engine, batch: Sequence[SamplingParams], num_tokens: int) -> StepPlan:
    """Plan a step that computes whole prompts and writes their KV to the last block."""
    spec, token_ids = engine.kv_memory.spec, [_TOKEN] * num_tokens
    num_blocks = -(-(num_tokens + 1) // spec.block_size) * spec.num_groups
    return StepPlan(
        tuple(_new_row(row, params, token_ids) for row, params in enumerate(batch)),
        tuple(NewBlocks(row, [engine.num_blocks - 1] * num_blocks) for row in range(len(batch))),
        [number for row in range(len(batch)) for number in (row, 0, num_tokens, num_tokens)],
        token_ids * len(batch),
        _constrained(batch),
    )


def _decodes(batch: Sequence[SamplingParams], num_tokens: int) -> StepPlan:
    """Plan the step after `_prompts`, which computes one more token per request."""
    shares = [n for row in range(len(batch)) for n in (row, num_tokens, 1, num_tokens + 1)]
    return StepPlan((), (), shares, [_TOKEN] * len(batch), _constrained(batch))


def _new_row(row: int, params: SamplingParams, token_ids: list[int]) -> NewRow:
    looks_back = params.changes_logits or params.prompt_logprobs is not None
    known = token_ids if looks_back else []
    num_tokens, stops = len(token_ids), frozenset[int]()
    return NewRow(row, _name(row), params, row, num_tokens, stops, known)


def _constrained(batch: Sequence[SamplingParams]) -> tuple[str, ...]:
    has_grammar = (params.structured_output is not None for params in batch)
    return tuple(_name(row) for row, has_one in enumerate(has_grammar) if has_one)


def _name(row: int) -> str:
    return f"rehearsal-{row}"
