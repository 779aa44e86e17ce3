"""StepLog: writes debug lines: the requests that a step computes or ends, and why others wait.

Costs one check of the log level per step while debug lines are off. Refuses to know: tensors,
nodes.
"""

from __future__ import annotations

import logging

from engine.core.outputs import ScheduledRequest, SchedulerOutput, StepResult
from engine.core.scheduler import FREE_SHARE, Scheduler

logger = logging.getLogger(__name__)
_MOST_SHOWN = 16  # maximum number of requests in one line


class StepLog:
    """Writes the debug lines of one engine.

    Args:
        scheduler: the engine's scheduler, which is only read.
        max_num_requests: maximum number of requests in a step.
    """

    def __init__(self, scheduler: Scheduler, max_num_requests: int) -> None:
        self._scheduler, self._max_num_requests = scheduler, max_num_requests
        self._num_steps = 0
        self._num_evicted = self._num_preemptions = 0

    def note_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Write what a step will compute, and why the next waiting request is not in it."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        scheduler = self._scheduler
        why = self._why_waits()
        pool = scheduler.kv_cache_manager.block_pool
        num_evicted, num_preemptions = pool.num_evicted, scheduler.num_preemptions
        if scheduled.scheduled or why:
            self._num_steps += bool(scheduled.scheduled)
            shown = ", ".join(map(_share, scheduled.scheduled[:_MOST_SHOWN]))
            logger.debug(
                "step %d: %d tokens of %d requests (%s); %d run, %d wait, %d parked; %d of %d "
                "blocks are free, %d contents cached, %d evicted and %d requests preempted since "
                "the last step%s",
                self._num_steps,
                scheduled.num_scheduled_tokens,
                len(scheduled.scheduled),
                shown or "none",
                scheduler.num_running,
                scheduler.num_waiting,
                len(scheduler.requests) - scheduler.num_running - scheduler.num_waiting,
                pool.num_free,
                pool.num_blocks,
                pool.num_cached,
                num_evicted - self._num_evicted,
                num_preemptions - self._num_preemptions,
                f"; {why}" if why else "",
            )
        self._num_evicted, self._num_preemptions = num_evicted, num_preemptions

    def _why_waits(self) -> str:
        """Explain why the next waiting request did not start; empty if no request waits."""
        scheduler, request = self._scheduler, self._scheduler.next_waiting
        if request is None:
            return ""
        manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
        num_blocks = manager.num_blocks_for(request.num_tokens) - len(request.block_ids)
        num_kept = int(pool.num_blocks * FREE_SHARE)
        if scheduler.num_running >= self._max_num_requests:
            why = f"all {self._max_num_requests} places of the batch are taken"
        elif num_blocks + num_kept > pool.num_free:
            why = f"up to {num_blocks} blocks needed, {num_kept} kept in reserve"
        else:
            why = "no tokens left in the step, or a request was just preempted"
        return f"{request.request_id} waits: {why}"

    def note_result(self, result: StepResult) -> None:
        """Write which requests a step has ended."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        for request in result.finished:
            logger.debug(
                "%s: %s after %d output tokens; %d of %d prompt tokens were cached, %d forwards, "
                "%d preemptions",
                request.request_id,
                request.status.value,
                request.num_output_tokens,
                request.num_hit_tokens,
                request.num_prompt_tokens,
                request.num_forwards,
                request.num_preemptions,
            )


def _share(item: ScheduledRequest) -> str:
    request = item.request
    start = request.num_computed_tokens + request.num_tokens_in_flight
    return (
        f"{request.request_id}: {start}+{item.num_scheduled_tokens} of {request.num_tokens}, "
        f"{len(request.block_ids)} blocks"
    )
