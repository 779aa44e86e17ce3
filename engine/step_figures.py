"""StepFigures: counts what an engine's steps computed and read, and measures their times.

The measured times also limit the next step's number of prompt tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from baton.api.outputs import FinishReason
from baton.kv.cache_use import CacheUse
from engine.core.drafts import ALL
from engine.core.metrics import EngineMetrics, KVFileCounts, by_sign
from engine.core.outputs import SchedulerOutput
from engine.core.scheduler import Scheduler
from engine.executors.base import Executor
from engine.step_log import StepLog
from engine.step_stretch import StepStretch
from models.work import model_work

# The options limit the prompt tokens of a step that decodes. The limit divided by this number is
# always allowed, even if the step then takes too long. With fewer tokens, a prompt would need more
# steps, each of which reads all weights.
_LEAST_PART = 8


class StepFigures:
    """Counts the steps of one engine, and limits by how much prompts lengthen them.

    Args:
        scheduler: the engine's scheduler, whose counters are read.
        executor: computes the steps; its model determines the operations and bytes per token.

    Attributes:
        num_steps: steps that computed something and have ended.
        log: debug lines of the steps.
        file_counts: returns the counts of the prefix cache's file tier; None: there is none.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.num_steps = 0
        self.log = StepLog(scheduler, executor.config.max_num_requests)
        self._scheduler, self._config = scheduler, executor.config
        self._executor = executor
        self.file_counts: Callable[[], KVFileCounts | None] = lambda: None
        most_beside = executor.config.prefill_tokens_beside_decodes
        self._least_beside = max(most_beside // _LEAST_PART, 1)
        self._stretch: StepStretch | None = None
        self._made_at = time.monotonic()
        memory, manifest = executor.kv_memory, executor.kv_memory.manifest
        self._block_bytes = sum(map(manifest.unit_bytes, range(manifest.num_ranks)))
        self._work = model_work(
            executor.model_config,
            dtype=executor.dtype,
            weights=executor.config.weights,
            kv_cache_dtype="fp8" if memory.dtype.startswith("fp8") else "auto",
        )
        scheduler.counters.attention = self._work.attention

    def note_step(self, scheduled: SchedulerOutput, computed_s: float) -> None:
        """Count an ended step that took ``computed_s`` seconds; call before `Scheduler.update`."""
        if self._stretch is not None and scheduled.decodes and not scheduled.has_drafts:
            self._stretch.note_step(scheduled.num_prompt_tokens, computed_s)
        self.num_steps += 1
        counters, num_tokens = self._scheduler.counters, scheduled.num_scheduled_tokens
        counters.forward_s += computed_s
        counters.note_step(num_tokens)
        counters.note_work(scheduled)
        counters.experts_read += self._work.expert_share(num_tokens)

    def limit_stretch(self, limit: float | None) -> None:
        """Limit the time of steps that decode and compute prompts, relative to decode-only steps.

        Steps with drafts are not measured.

        Args:
            limit: longest time of a step that decodes and computes prompts, as a multiple of the
                time of a decode-only step; above 1. None: only ``prefill_tokens_beside_decodes``
                limits these steps.
        """
        self._stretch = None if limit is None else StepStretch(limit, self._least_beside)

    def num_beside_decodes(self) -> int:
        """Return the maximum number of prompt tokens of the next step if it also decodes."""
        return ALL if self._stretch is None else self._stretch.num_tokens()

    def metrics(self) -> EngineMetrics:
        """Return the metrics; safe from any thread, even during a step."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        pool = scheduler.kv_cache_manager.block_pool
        running, waiting = scheduler.num_running, scheduler.num_waiting
        looks_up, work = self._config.prefix_cache, self._work
        held, unfilled = self._slots()
        busiest, mean = self._executor.expert_loads()
        return EngineMetrics(
            steps_total=self.num_steps,
            prompt_tokens_computed_total=counters.prompt_tokens_computed,
            output_tokens_total=counters.output_tokens,
            cached_prompt_tokens_total=counters.cached_prompt_tokens,
            prefix_lookups_total=counters.prefix_lookups if looks_up else 0,
            prefix_lookup_tokens_total=counters.prefix_lookup_tokens if looks_up else 0,
            preemptions_total=scheduler.num_preemptions,
            requests_finished_stop_total=counters.finished[FinishReason.STOP],
            requests_finished_length_total=counters.finished[FinishReason.LENGTH],
            requests_finished_abort_total=counters.finished[FinishReason.ABORT],
            requests_running=running,
            requests_waiting=waiting,
            requests_parked=max(len(scheduler.requests) - running - waiting, 0),
            blocks=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            forward_seconds_total=counters.forward_s,
            step_seconds_total=counters.step_s,
            uptime_seconds=time.monotonic() - self._made_at,
            blocks_evicted_total=pool.num_evicted,
            device_peak_flops=self._config.peak_flops,
            device_peak_bandwidth=self._config.peak_bandwidth,
            blocks_used_peak=pool.num_blocks - pool.least_free,
            kv_slots_held=held,
            kv_slots_unfilled=unfilled,
            residency=pool.residency.copy(),
            pins=replace(counters.pins),
            received_prompt_tokens_total=counters.received_prompt_tokens,
            step_tokens_total=counters.step_tokens,
            steps_by_tokens=tuple(counters.steps_by_tokens),
            model_flops_total=counters.step_tokens * work.token_flops
            + counters.output_tokens * work.head_flops
            + counters.attention_flops,
            weight_read_bytes_total=self.num_steps * work.weight_bytes
            + counters.experts_read * work.expert_bytes,
            kv_read_bytes_total=float(counters.kv_read_bytes),
            requests_started_by_priority=by_sign(counters.started),
            preemptions_by_priority=by_sign(counters.preempted),
            draft_steps_total=counters.draft_steps,
            drafts_total=counters.drafts,
            accepted_drafts_total=sum(counters.accepted_drafts_by_place),
            accepted_drafts_by_place=tuple(counters.accepted_drafts_by_place),
            images_encoded_total=counters.images_encoded,
            encodings_received_total=counters.encodings_received,
            encoder_cache_hits_total=counters.encoder_cache_hits,
            encoder_seconds_total=counters.encoder_s,
            expert_rows_busiest_rank_total=busiest,
            expert_rows_mean_rank_total=mean,
            kv_files=self.file_counts(),
        )

    def cache_use(self, num_fetched_tokens: int, fetched_age_s: float = 0.0) -> CacheUse:
        """Return the prefix cache's size, and how many prompt tokens came from each source.

        Safe from any thread. Each beat calls this method, so it reads only the figures it returns.

        Args:
            num_fetched_tokens: prompt tokens that other nodes sent from their caches.
            fetched_age_s: median age of these tokens' blocks, see `CacheUse`.
        """
        scheduler, counters = self._scheduler, self._scheduler.counters
        pool, files = scheduler.kv_cache_manager.block_pool, self.file_counts() or KVFileCounts()
        idle = pool.residency.idle_before_eviction
        num_blocks = pool.num_cached
        # Tokens that were read or fetched for a prompt count as cached, too, so subtract them.
        num_read_tokens = max(files.tokens_read - files.tokens_unawaited, 0)
        brought = num_read_tokens + num_fetched_tokens
        return CacheUse(
            num_blocks=num_blocks,
            num_bytes=num_blocks * self._block_bytes,
            num_pinned_blocks=counters.pins.blocks,
            memory_tokens=max(counters.cached_prompt_tokens - brought, 0),
            file_tokens=num_read_tokens,
            fetched_tokens=num_fetched_tokens,
            file_bytes=files.bytes_stored,
            num_files=files.files_stored,
            are_objects=files.are_objects,
            memory_age_s=pool.residency.reuse_gap.median_s(),
            file_age_s=files.ages.median_s(),
            fetched_age_s=fetched_age_s,
            evicted_after_s=idle.sum_s / max(sum(idle.counts), 1),
        )

    def _slots(self) -> tuple[int, int]:
        """Return how many token slots the blocks of open requests have, and how many are empty."""
        manager, held, unfilled = self._scheduler.kv_cache_manager, 0, 0
        for request in list(self._scheduler.requests.values()):
            num_held = manager.num_tokens_held(request)
            held += num_held
            unfilled += max(num_held - request.num_tokens, 0)
        return held, unfilled
