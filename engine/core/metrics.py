"""EngineMetrics: an engine's metrics as plain numbers, and the counters they are computed from.

Names follow Prometheus: values named ``_total`` only grow, all others are present values, and times
are in seconds. Refuses to know: how metrics are exported.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.api.outputs import FinishReason
from baton.kv.residency import BlockResidency, SecondsHistogram
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request

# Requests are counted by the sign of their priority, because there are too many priorities for
# labels.
PRIORITY_SIGNS = {-1: "negative", 0: "zero", 1: "positive"}
# Upper bounds, in computed tokens, of the buckets that count steps by size; one more bucket counts
# larger steps.
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Reasons why a look-up or a read gives fewer blocks than a prompt needs. absent: no file has
# the next block. gone: another node removed the file. foreign: the file's content does not belong
# to its name. late: the read took longer than its deadline. no_blocks: this node has too few free
# blocks. off: the tier is turned off for a while.
MISS_CAUSES = (
    *("absent", "gone", "short", "damaged", "foreign", "error", "late", "no_blocks", "off"),
)
# Outcomes of runs of blocks that were queued for writing. skipped: the blocks were evicted before
# they were written, or too many runs were waiting.
WRITE_ENDS = ("written", "skipped", "failed")


@dataclass(slots=True)
class PinCounts:
    """Counts of pinned prefixes; see `engine/core/pins`.

    Attributes:
        open: pins now.
        blocks: pinned blocks that are cached now.
        made: pins made since the start; a pin of a prefix that is pinned already is not counted.
        expired: pins whose time ended.
        displaced: pins that newer pins of their owner took the place of.
        dropped: pins that a client or an operator ended.
        refused: pins that were not made, because not one block of them may be pinned.
    """

    open: int = 0
    blocks: int = 0
    made: int = 0
    expired: int = 0
    displaced: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass(slots=True)
class KVFileCounts:
    """Counts of the prefix cache's file tier since the start, and the size of its folder.

    Each field has one writing thread.

    Attributes:
        hits: requests that got blocks from files.
        misses: look-ups and reads that ended early, by cause.
        tokens_read, bytes_read: tokens and bytes of KV that were read from files.
        tokens_unawaited: the part of ``tokens_read`` for which no request waited: tokens of
            prefetches, and tokens that were read after the deadline.
        runs: runs of blocks that were queued for writing, by outcome.
        bytes_written: bytes of the written files.
        files_evicted: files that this node removed because ``--kv-files-size`` was reached.
        bytes_stored, files_stored: all known files, those of other nodes and models included.
        are_objects: whether the files are objects on a server.
        ages: time from the last use of a block until it was read from a file.
    """

    hits: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_CAUSES, 0))
    tokens_read: int = 0
    tokens_unawaited: int = 0
    bytes_read: int = 0
    runs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRITE_ENDS, 0))
    bytes_written: int = 0
    files_evicted: int = 0
    bytes_stored: int = 0
    files_stored: int = 0
    are_objects: bool = False
    ages: SecondsHistogram = field(default_factory=SecondsHistogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """A snapshot of an engine's metrics; totals count from the engine's start.

    Attributes:
        steps_total: steps that computed something.
        prompt_tokens_computed_total: computed prompt tokens, counted again after a preemption.
        output_tokens_total: tokens sampled by this engine.
        cached_prompt_tokens_total: prompt tokens found in the prefix cache when requests began.
        prefix_lookups_total: requests that looked for their prompt in the prefix cache.
        prefix_lookup_tokens_total: prompt tokens of these requests; the denominator of the hit
            rate.
        preemptions_total: times that a request lost its blocks to another request.
        requests_finished_stop_total: requests ended by an end token or a stop token.
        requests_finished_length_total: requests ended by a length limit.
        requests_finished_abort_total: requests that the client aborted, or that a stop string
            ended.
        requests_started_by_priority: requests that began to run here, by the sign of their priority
            (`PRIORITY_SIGNS`).
        preemptions_by_priority: preemptions, by the sign of the preempted request's priority.
        requests_running: requests that the next step may compute.
        requests_waiting: requests that wait for their first step, or for blocks.
        requests_parked: requests that wait for a remote node's KV, for a sibling's prompt, for a
            compiled grammar or for decoded images.
        blocks: blocks of the KV cache.
        blocks_free: free blocks, including those that keep a cached prefix.
        blocks_cached: different contents that the prefix cache can find.
        blocks_evicted_total: cached blocks that were evicted, to be allocated again.
        blocks_used_peak: maximum number of blocks in use at a time.
        kv_slots_held: tokens that the blocks of open requests have room for.
        kv_slots_unfilled: those of ``kv_slots_held`` that hold no known token.
        residency: how long blocks kept their cached contents.
        pins: counts of pinned prefixes.
        received_prompt_tokens_total: prompt tokens whose KV a remote node wrote.
        step_tokens_total: tokens that steps computed, of prompts and outputs.
        steps_by_tokens: steps by their number of computed tokens, in buckets of `STEP_TOKENS`.
        model_flops_total: floating-point operations, estimated from the model's configuration
            (`models/work.py`).
        weight_read_bytes_total, kv_read_bytes_total: bytes of weights and of KV that were read,
            estimated from the model's configuration.
        device_peak_flops, device_peak_bandwidth: floating-point operations and bytes per second
            that the devices could reach, as the options say; 0: unknown.
        draft_steps_total: requests with drafts, summed over steps.
        drafts_total: drafts that were computed.
        accepted_drafts_total: computed drafts that became part of an output.
        accepted_drafts_by_place: accepted drafts by their place among a request's drafts of one
            step: first, second, and so on.
        images_encoded_total: images that steps encoded, counted again if the encoding was dropped.
        encodings_received_total: images of prompts whose encoding came from an encode node.
        encoder_cache_hits_total: images of prompts whose encoding was in the encoder cache.
        encoder_seconds_total: seconds in the image encoder; part of ``forward_seconds_total``.
        expert_rows_busiest_rank_total, expert_rows_mean_rank_total: rows that experts computed on
            the busiest rank, and on a mean rank; see `Executor.expert_loads`.
        kv_files: counts of the prefix cache's file tier; None: there is no file tier.
        forward_seconds_total: seconds in the model and the sampler.
        step_seconds_total: seconds in whole steps.
        uptime_seconds: seconds since the engine started.
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
    device_peak_flops: float = 0.0
    device_peak_bandwidth: float = 0.0
    blocks_used_peak: int = 0
    kv_slots_held: int = 0
    kv_slots_unfilled: int = 0
    residency: BlockResidency = field(default_factory=BlockResidency)
    pins: PinCounts = field(default_factory=PinCounts)
    requests_started_by_priority: Mapping[str, int] = field(default_factory=dict)
    preemptions_by_priority: Mapping[str, int] = field(default_factory=dict)
    images_encoded_total: int = 0
    encodings_received_total: int = 0
    encoder_cache_hits_total: int = 0
    encoder_seconds_total: float = 0.0
    expert_rows_busiest_rank_total: float = 0.0
    expert_rows_mean_rank_total: float = 0.0
    kv_files: KVFileCounts | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Return the mean number of tokens per step of a request with drafts; 1 without drafts."""
        return 1 + self.accepted_drafts_total / max(self.draft_steps_total, 1)


def sign_of(priority: int) -> int:
    """Return the sign of a priority: -1, 0 or 1."""
    return (priority > 0) - (priority < 0)


def by_sign(counts: Mapping[int, int]) -> dict[str, int]:
    """Return counts of requests by sign of priority, with an entry for each of `PRIORITY_SIGNS`."""
    return {name: counts[sign] for sign, name in PRIORITY_SIGNS.items()}


def attended_tokens(begin: int, end: int, window: int | None) -> int:
    """Return how many (token, attended token) pairs positions ``begin`` to ``end - 1`` have."""
    full_from = end if window is None else min(max(begin, window), end)
    ramp = (full_from - begin) * (begin + full_from + 1) // 2
    return ramp + (end - full_from) * (window or 0)


@dataclass(slots=True)
class EngineCounters:
    """Counts that grow as an engine works; see `EngineMetrics`. Only the engine's thread writes.

    Attributes:
        started, preempted: numbers of requests by the sign of their priority.
        experts_read: sum over steps of the fraction of all experts whose weights the step read.
        attention: (window, FLOPs, bytes) of each window, summed over its layers; window None: full
            attention. FLOPs are counted per pair of tokens of which one attends to the other; bytes
            are counted per token whose KV is read.
        attention_flops: FLOPs of attention to other tokens.
        kv_read_bytes: bytes of KV that were read; a prompt chunk reads the KV of earlier tokens
            once.
    """

    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefix_lookups: int = 0
    prefix_lookup_tokens: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    pins: PinCounts = field(default_factory=PinCounts)
    started: dict[int, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_SIGNS, 0))
    preempted: dict[int, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_SIGNS, 0))
    draft_steps: int = 0
    drafts: int = 0
    accepted_drafts_by_place: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    step_s: float = 0.0
    received_prompt_tokens: int = 0
    step_tokens: int = 0
    experts_read: float = 0.0
    attention: tuple[tuple[int | None, int, int], ...] = ()
    attention_flops: int = 0
    kv_read_bytes: int = 0
    images_encoded: int = 0
    encodings_received: int = 0
    encoder_cache_hits: int = 0
    encoder_s: float = 0.0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def note_start(self, request: Request) -> None:
        """Count a request that begins to run."""
        self.started[sign_of(request.priority)] += 1

    def note_preemption(self, request: Request) -> None:
        """Count a preempted request."""
        self.preempted[sign_of(request.priority)] += 1

    def note_step(self, num_tokens: int) -> None:
        """Count a step that computed ``num_tokens`` tokens."""
        self.step_tokens += num_tokens
        self.steps_by_tokens[bisect.bisect_left(STEP_TOKENS, num_tokens)] += 1

    def note_work(self, scheduled: SchedulerOutput) -> None:
        """Count a step's attention pairs, and the KV that it reads; call before requests change."""
        ends = list[int]()  # position after the token, for each request that computes one token
        for item in scheduled.scheduled:
            begin, num_tokens = item.request.num_computed_tokens, item.num_scheduled_tokens
            end = begin + num_tokens
            if num_tokens == 1:
                ends.append(end)
                continue
            for window, flops, kv_bytes in self.attention:
                first = 0 if window is None else max(begin + 1 - window, 0)
                self.attention_flops += flops * attended_tokens(begin, end, window)
                self.kv_read_bytes += kv_bytes * (end - first)
        for window, flops, kv_bytes in self.attention:
            each = ends if window is None else [end if end < window else window for end in ends]
            self.attention_flops += flops * sum(each)
            self.kv_read_bytes += kv_bytes * sum(each)

    def note_lookup(self, request: Request) -> None:
        """Count a request's look-up in the prefix cache, at its admission or grant."""
        self.prefix_lookups += 1
        self.prefix_lookup_tokens += request.num_prompt_tokens
        self.cached_prompt_tokens += request.num_hit_tokens

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts that a step computed for a request."""
        by_place = self.accepted_drafts_by_place
        by_place += [0] * (num_accepted - len(by_place))
        for place in range(num_accepted):
            by_place[place] += 1
        self.draft_steps += 1
        self.drafts += num_drafts
