"""Requests, schedulers and a model runner that computes nothing, for tests of the engine.

Refuses to know: what is asserted.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.sampling_params import SamplingParams
from engine.kv_cache_manager import KVCacheManager
from engine.outputs import ModelRunnerOutput, SchedulerOutput, StepResult
from engine.request import Request
from engine.scheduler import Scheduler

EOS = 9


def make_request(
    request_id: str,
    num_prompt_tokens: int = 4,
    max_tokens: int = 4,
    *,
    max_model_len: int = 10_000,
    seed: int = 0,
    params: SamplingParams | None = None,
) -> Request:
    """A request whose prompt is ones; token ``EOS`` ends its output."""
    return Request.create(
        request_id,
        [1] * num_prompt_tokens,
        params or SamplingParams(max_tokens=max_tokens),
        seed=seed,
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    *,
    max_num_requests: int = 8,
    max_num_batched_tokens: int = 64,
    long_prefill_threshold: int = 64,
) -> Scheduler:
    """A scheduler with its own blocks."""
    return Scheduler(
        KVCacheManager(num_blocks, block_size),
        max_num_requests=max_num_requests,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_threshold=long_prefill_threshold,
    )


class FakeRunner:
    """Stands in for ModelRunner: samples by a rule instead of a network.

    Args:
        next_token: given a request that samples, its next token.
    """

    def __init__(self, next_token: Callable[[Request], int] = lambda request: 2) -> None:
        self._next_token = next_token

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Tokens for those that computed their last known token, as the real runner gives."""
        return ModelRunnerOutput(
            {
                item.request.request_id: self._next_token(item.request)
                for item in scheduled.scheduled
                if item.samples
            }
        )


def shares(scheduled: SchedulerOutput) -> dict[str, int]:
    """Who computes how many tokens, in batch order."""
    return {item.request.request_id: item.num_scheduled_tokens for item in scheduled.scheduled}


def step(
    scheduler: Scheduler, runner: FakeRunner | None = None
) -> tuple[dict[str, int], StepResult]:
    """One whole step: who computed what, and what came of it."""
    scheduled = scheduler.schedule()
    scheduler.check()
    computed = shares(scheduled)
    result = scheduler.update(scheduled, (runner or FakeRunner()).execute(scheduled))
    scheduler.check()
    return computed, result
