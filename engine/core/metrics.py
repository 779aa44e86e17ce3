"""EngineMetrics: what an engine has done and holds, in plain numbers; what counts on the way.

Names are those of Prometheus: ``_total`` only grows, the others are of this moment, times are
seconds. Refuses to know: who exports them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from baton.api.outputs import FinishReason
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request

# Steps are counted by the tokens that they compute: up to 1, up to 2, ..., and more.
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """A snapshot; everything since the engine was made.

    Attributes:
        steps_total: that computed something.
        prompt_tokens_computed_total: again and again if preempted.
        output_tokens_total: sampled here; a token that a remote node sampled is counted there.
        cached_prompt_tokens_total: that requests found in the prefix cache when they began.
        prefix_lookups_total: requests that looked for their prompt in the prefix cache.
        prefix_lookup_tokens_total: tokens of these prompts; the denominator of a hit rate.
        preemptions_total: times that a request lost its blocks to another.
        requests_finished_stop_total: by an end token or a stop token.
        requests_finished_length_total: by their longest length.
        requests_finished_abort_total: by whoever sent them, or by a stop string.
        requests_running: that a step may compute now.
        requests_waiting: for their first step, or for blocks.
        requests_parked: whose KV a remote node is to write.
        blocks: of the KV cache.
        blocks_free: those that keep a cached prefix, and nobody holds, included.
        blocks_cached: different contents that the prefix cache can find.
        blocks_evicted_total: that were given out while they cached something.
        received_prompt_tokens_total: whose KV a remote node wrote.
        step_tokens_total: that steps computed, of prompts and outputs.
        steps_by_tokens: steps by the tokens that they computed; see `STEP_TOKENS`.
        model_flops_total: by the configuration; see `models/work.py`.
        weight_read_bytes_total, kv_read_bytes_total: likewise.
        draft_steps_total: times that a step computed drafts for a request.
        drafts_total: that were computed.
        accepted_drafts_total: of them, those that outputs went on with.
        accepted_drafts_by_place: the first of a request in a step, the second, and so on.
        forward_seconds_total: in the model and the sampler.
        step_seconds_total: in whole steps.
        uptime_seconds: since the engine was made.
    """

    steps_total: int
    prompt_tokens_computed_total: int
    output_tokens_total: int
    cached_prompt_tokens_total: int
    prefix_lookups_total: int
    prefix_lookup_tokens_total: int
    preemptions_total: int
    requests_finished_stop_total: int
    requests_finished_length_total: int
    requests_finished_abort_total: int
    requests_running: int
    requests_waiting: int
    requests_parked: int
    blocks: int
    blocks_free: int
    blocks_cached: int
    forward_seconds_total: float
    step_seconds_total: float
    uptime_seconds: float
    draft_steps_total: int = 0
    drafts_total: int = 0
    accepted_drafts_total: int = 0
    accepted_drafts_by_place: tuple[int, ...] = ()
    blocks_evicted_total: int = 0
    received_prompt_tokens_total: int = 0
    step_tokens_total: int = 0
    steps_by_tokens: tuple[int, ...] = ()
    model_flops_total: float = 0.0
    weight_read_bytes_total: float = 0.0
    kv_read_bytes_total: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a request got of a step which computed drafts for it; 1 without any."""
        return 1 + self.accepted_drafts_total / max(self.draft_steps_total, 1)


def attended_tokens(begin: int, end: int, window: int | None) -> int:
    """Add up how many tokens each of those from ``begin`` up to ``end`` attends to."""
    full_from = end if window is None else min(max(begin, window), end)
    ramp = (full_from - begin) * (begin + full_from + 1) // 2
    return ramp + (end - full_from) * (window or 0)


@dataclass(slots=True)
class EngineCounters:
    """What grows as an engine works; see `EngineMetrics`. Only the engine's thread writes.

    Attributes:
        experts_read: shares of all experts that steps read, added.
        attended_layers: tokens that are attended at most (None: all), and layers in which.
        attended: tokens that others attended to, in all layers.
        kv_read: tokens whose KV steps read, in all layers; a chunk reads what is before it once.
    """

    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefix_lookups: int = 0
    prefix_lookup_tokens: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    draft_steps: int = 0
    drafts: int = 0
    accepted_drafts_by_place: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    step_s: float = 0.0
    received_prompt_tokens: int = 0
    step_tokens: int = 0
    experts_read: float = 0.0
    attended_layers: tuple[tuple[int | None, int], ...] = ()
    attended: int = 0
    kv_read: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def note_step(self, num_tokens: int) -> None:
        """A step computed so many tokens."""
        self.step_tokens += num_tokens
        self.steps_by_tokens[bisect.bisect_left(STEP_TOKENS, num_tokens)] += 1

    def note_work(self, scheduled: SchedulerOutput) -> None:
        """A step computed this, and its requests were not told yet."""
        ends = list[int]()  # of requests of which it computed one token
        for item in scheduled.scheduled:
            begin, num_tokens = item.request.num_computed_tokens, item.num_scheduled_tokens
            end = begin + num_tokens
            if num_tokens == 1:
                ends.append(end)
                continue
            for window, num_layers in self.attended_layers:
                first = 0 if window is None else max(begin + 1 - window, 0)
                self.attended += num_layers * attended_tokens(begin, end, window)
                self.kv_read += num_layers * (end - first)
        for window, num_layers in self.attended_layers:
            each = ends if window is None else [end if end < window else window for end in ends]
            self.attended += num_layers * sum(each)
            self.kv_read += num_layers * sum(each)

    def note_lookup(self, request: Request) -> None:
        """A request looked for its prompt in the prefix cache, when it was admitted or granted."""
        self.prefix_lookups += 1
        self.prefix_lookup_tokens += request.num_prompt_tokens
        self.cached_prompt_tokens += request.num_cached_tokens

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A step computed drafts for a request."""
        by_place = self.accepted_drafts_by_place
        by_place += [0] * (num_accepted - len(by_place))
        for place in range(num_accepted):
            by_place[place] += 1
        self.draft_steps += 1
        self.drafts += num_drafts
