"""Requests, schedulers and a model runner that computes nothing, for tests of the engine.

Refuses to know: what is asserted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from baton.api.pooling import PoolingParams
from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.outputs import (
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
from engine.core.request import Request
from engine.core.scheduler import Scheduler

EOS = 9


def make_request(
    request_id: str,
    num_prompt_tokens: int = 4,
    max_tokens: int = 4,
    *,
    max_model_len: int = 10_000,
    seed: int = 0,
    params: SamplingParams | None = None,
    prompt: Sequence[int] | None = None,
    extra_keys: tuple[bytes, ...] = (),
    priority: int = 0,
    pooling: PoolingParams | None = None,
) -> Request:
    """A request whose prompt is ones unless given; token ``EOS`` ends its output."""
    return Request.create(
        request_id,
        [1] * num_prompt_tokens if prompt is None else list(prompt),
        params or SamplingParams(max_tokens=max_tokens),
        seed=seed,
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
        extra_keys=extra_keys,
        priority=priority,
        pooling=pooling,
    )


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    *,
    max_num_requests: int = 8,
    max_num_batched_tokens: int = 64,
    long_prefill_token_threshold: int = 64,
    prefill_tokens_beside_decodes: int = 64,
    prefix_cache: bool = False,
    sliding_windows: Sequence[int | None] = (None,),
    by_priority: bool = False,
) -> Scheduler:
    """A scheduler with its own blocks, which records what its prefix cache stores."""
    return Scheduler(
        KVCacheManager(
            num_blocks,
            block_size,
            sliding_windows=sliding_windows,
            hasher=BlockHasher(block_size) if prefix_cache else None,
            record_events=True,
        ),
        max_num_requests=max_num_requests,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        prefill_tokens_beside_decodes=prefill_tokens_beside_decodes,
        by_priority=by_priority,
    )


class FakeRunner:
    """Stands in for ModelRunner: samples by a rule instead of a network.

    Args:
        next_token: returns the next token of a request that samples.
        propose: returns drafts for the next step of a request that has sampled.
    """

    def __init__(
        self,
        next_token: Callable[[Request], int] = lambda request: 2,
        propose: Callable[[Request], tuple[int, ...]] = lambda request: (),
    ) -> None:
        self.next_token = next_token
        self.propose = propose

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Sample for requests that computed their last known token, as the real runner does."""
        sampled, proposed, pooled = {}, {}, {}
        for item in scheduled.scheduled:
            if item.samples and item.request.pooling is not None:
                pooled[item.request.request_id] = bytes(4)
            elif item.samples:
                token_ids = self._sample(item)
                sampled[item.request.request_id] = token_ids
                drafts = self.propose(extended(item.request, token_ids))
                if drafts:
                    proposed[item.request.request_id] = drafts
        return ModelRunnerOutput(sampled, draft_token_ids=proposed, pooled=pooled)

    def _sample(self, item: ScheduledRequest) -> tuple[int, ...]:
        """Return the next token, and one more after each accepted draft."""
        token_ids: tuple[int, ...] = (self.next_token(item.request),)
        for draft in item.draft_token_ids:
            if draft != token_ids[-1]:
                break
            token_ids = (*token_ids, self.next_token(extended(item.request, token_ids)))
        return token_ids


def extended(request: Request, token_ids: Sequence[int]) -> Request:
    """Return a copy of a request with more tokens."""
    copied = copy.copy(request)
    copied.token_ids = [*request.token_ids, *token_ids]
    return copied


class ContentRunner(FakeRunner):
    """A FakeRunner that keeps in each slot what its KV would depend on, and checks what it reads.

    Args:
        sliding_windows: window of each KV cache group, in tokens; None: full attention.
        next_token, propose: see `FakeRunner`.
    """

    def __init__(
        self,
        block_size: int,
        sliding_windows: Sequence[int | None] = (None,),
        next_token: Callable[[Request], int] = lambda request: 2,
        propose: Callable[[Request], tuple[int, ...]] = lambda request: (),
    ) -> None:
        super().__init__(next_token, propose)
        self._block_size = block_size
        self._windows = sliding_windows
        self._slots: dict[tuple[int, int], object] = {}

    def write(self, request: Request, start: int, end: int) -> None:
        """Write as computing or receiving the KV of positions ``start .. end - 1`` does."""
        self.write_into(request.block_ids, request, start, end)

    def write_into(self, block_ids: Sequence[int], request: Request, start: int, end: int) -> None:
        """Do `write` in these blocks, wherever the request's own blocks are by now."""
        for group in range(len(self._windows)):
            for position in range(start, end):
                slot = self._slot(block_ids, group, position)
                self._slots[slot] = self._content(request, group, position)

    def write_what_travels(self, request: Request) -> None:
        """Write as an arriving prompt does: the blocks that its next token attends to."""
        num_tokens = request.num_prompt_tokens
        for group, window in enumerate(self._windows):
            oldest = 0 if window is None else max(num_tokens - window + 1, 0)
            for position in range(oldest // self._block_size * self._block_size, num_tokens):
                slot = self._slot(request.block_ids, group, position)
                self._slots[slot] = self._content(request, group, position)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with garbage, as a peer would that writes something else there."""
        for block_id in block_ids:
            for offset in range(self._block_size):
                self._slots[block_id, offset] = "garbage"

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Let all requests write before any reads: this reveals writes into others' blocks."""
        spans = [
            (extended(item.request, item.draft_token_ids), start, start + item.num_scheduled_tokens)
            for item in scheduled.scheduled
            for start in (item.request.num_computed_tokens,)
        ]
        for request, start, end in spans:
            self.write(request, start, end)
        for request, start, end in spans:
            for group, window in enumerate(self._windows):
                oldest = 0 if window is None else max(start - window + 1, 0)
                for position in range(oldest, end):
                    found = self._slots.get(self._slot(request.block_ids, group, position))
                    place = (request.request_id, group, position)
                    assert found == self._content(request, group, position), place
        return super().execute(scheduled)

    def _slot(self, block_ids: Sequence[int], group: int, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self._block_size)
        return block_ids[block * len(self._windows) + group], offset

    @staticmethod
    def _content(request: Request, group: int, position: int) -> object:
        return group, request.extra_keys, tuple(request.token_ids[: position + 1])


def shares(scheduled: SchedulerOutput) -> dict[str, int]:
    """Return each request's number of scheduled tokens, in batch order."""
    return {item.request.request_id: item.num_scheduled_tokens for item in scheduled.scheduled}


def step(
    scheduler: Scheduler, runner: FakeRunner | None = None
) -> tuple[dict[str, int], StepResult]:
    """Run one whole step; return what was scheduled, and its results."""
    scheduled = scheduler.schedule()
    scheduler.check()
    computed = shares(scheduled)
    result = scheduler.update(scheduled, (runner or FakeRunner()).execute(scheduled))
    scheduler.check()
    return computed, result
