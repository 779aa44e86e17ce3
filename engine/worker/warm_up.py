"""Dummy steps at the start: compile kernels, show a step's memory, and check the weights.

A kernel is compiled when it is launched for the first time, and again for certain other sizes. On a
GPU, dummy steps compile kernels for some seconds at start, so that no request has to wait. All
dummy steps use a cache of one block. Refuses to know: schedulers, the amount of memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from baton.api.errors import ConfigError, ModelLoadError
from baton.api.sampling_params import MAX_LOGPROBS, SamplingParams
from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import SHARE, NewBlocks, NewRow, StepPlan
from engine.worker.kv_cache import KVCacheSpec, allocate_kv_cache
from engine.worker.make_runner import LoadedModel, make_model_runner

logger = logging.getLogger(__name__)

_SAMPLED = SamplingParams(top_p=0.9, seed=0)
_WITH_LOGPROBS = SamplingParams(top_p=0.9, seed=0, logprobs=MAX_LOGPROBS)
_MOST_PROBABLE = SamplingParams(temperature=0, logprobs=1)
_CHECKED_PROMPTS = 4  # more than 1, because a single prompt may give NaN by chance
_PROMPT_TOKENS = 2  # tokens of a dummy prompt; a single token would be a decode


def warm_up(loaded: LoadedModel, max_model_len: int) -> None:
    """Compute the largest step, and, on a GPU, small steps that need other kernels.

    Raises ConfigError if the largest step does not fit.
    """
    started, config, spec = time.monotonic(), loaded.config, loaded.spec
    steps = [largest_step(config, max_model_len, spec), *small_steps(config, spec)]
    try:
        compute_dummies(loaded, steps)
    except torch.OutOfMemoryError as error:
        raise too_large(max_model_len, str(loaded.device)) from error
    logger.info("warmed up in %.1f s", time.monotonic() - started)


def compute_dummies(loaded: LoadedModel, steps: Iterable[StepPlan]) -> list[ModelRunnerOutput]:
    """Compute dummy steps on a temporary KV cache; return their outputs."""
    steps = list(steps)
    longest = max(
        start + num_tokens
        for step in steps
        for start, num_tokens in zip(step.shares[1::SHARE], step.shares[2::SHARE], strict=True)
    )
    runner = make_model_runner(loaded, allocate_kv_cache(loaded.spec, 1, loaded.device), longest)
    return [runner.execute(step) for step in steps]


def check_numbers(loaded: LoadedModel) -> None:
    """Raise ModelLoadError if the logits after several short prompts are all NaN or infinite.

    Without this check, a node whose weights are NaN would join and answer every request with an
    error.
    """
    vocab_size, config = loaded.model.config.vocab_size, loaded.config
    num_prompts = min(_CHECKED_PROMPTS, config.max_num_requests, config.max_num_batched_tokens)
    token_ids = [vocab_size * index // num_prompts for index in range(num_prompts)]
    step = replace(_plan([(1, 1)] * num_prompts, _MOST_PROBABLE, loaded.spec), token_ids=token_ids)
    [output] = compute_dummies(loaded, [step])
    if len(output.without_numbers) == num_prompts:
        raise ModelLoadError(
            "model: its logits are not numbers: the weights are damaged, or too large for dtype"
        )


def too_large(num_tokens: int, where: str) -> ConfigError:
    """Return the error which says that the largest step does not fit into a device's memory."""
    return ConfigError(
        f"max_model_len: a step with a request of {num_tokens} tokens does not fit {where}; "
        "lower it, or long_prefill_token_threshold"
    )


def largest_step(config: EngineConfig, max_seq_len: int, spec: KVCacheSpec) -> StepPlan:
    """Return the step that needs most memory: as many tokens and requests as a step may have.

    The first request computes the last chunk of a prompt of ``max_seq_len`` tokens; the other
    requests compute first chunks. Every request samples. All requests use block 0.
    """
    left, dummies = config.max_num_batched_tokens, list[tuple[int, int]]()
    for index in range(config.max_num_requests):
        others = config.max_num_requests - index - 1
        num_tokens = min(config.long_prefill_token_threshold, left - others, max_seq_len)
        left -= num_tokens
        dummies.append((max_seq_len if index == 0 else num_tokens, num_tokens))
    return _plan(dummies, _WITH_LOGPROBS, spec, config.max_num_drafts)


def small_steps(config: EngineConfig, spec: KVCacheSpec) -> Iterator[StepPlan]:
    """Yield a prompt step and a decode step for each number of requests that has its own kernels.

    Unlike the largest step, these steps sample on the device. The numbers of requests are 1, for
    which Triton compiles separate kernels; each power of two, for which attention plans decodes
    differently; and the maximum number of requests.
    """
    most = config.max_num_requests
    counts = {1, 2, most} | {2**power for power in range(4, most.bit_length())}
    # Kinds of requests: (number of tokens, how many of them the step computes, how many of the
    # computed tokens are drafts). All kinds but the first are decodes.
    kinds = [(_PROMPT_TOKENS, _PROMPT_TOKENS, 0), (_PROMPT_TOKENS, 1, 0)]
    if config.max_num_drafts:
        num_computed = 1 + config.max_num_drafts
        kinds.append((1 + num_computed, num_computed, config.max_num_drafts))
    for num_requests in sorted(count for count in counts if count <= most):
        for seq_len, num_tokens, num_drafts in kinds:
            if num_tokens == 1 or num_requests * num_tokens <= config.max_num_batched_tokens:
                dummies = [(seq_len, num_tokens)] * num_requests
                yield _plan(dummies, _SAMPLED, spec, num_drafts)


def _plan(
    dummies: Sequence[tuple[int, int]],
    params: SamplingParams,
    spec: KVCacheSpec,
    num_drafts: int = 0,
) -> StepPlan:
    """Plan a step of requests that all use block 0 and all sample.

    Args:
        dummies: for each request, its number of tokens, and how many of the last ones to compute.
        num_drafts: maximum number of drafts among a request's computed tokens.
    """
    shares: list[int] = []
    new_rows: list[NewRow] = []
    for row, (seq_len, num_tokens) in enumerate(dummies):
        num_known = seq_len - min(num_drafts, num_tokens - 1)
        shares += (row, seq_len - num_tokens, num_tokens, num_known)
        new_rows.append(
            NewRow(
                *(row, f"dummy-{row}", params, 0, num_known, frozenset(), []), is_drafted_for=True
            )
        )
    return StepPlan(
        tuple(new_rows),
        tuple(
            NewBlocks(row, [0] * (-(-seq_len // spec.block_size) * spec.num_groups))
            for row, (seq_len, _) in enumerate(dummies)
        ),
        shares,
        [0] * sum(num_tokens for _, num_tokens in dummies),
    )
