"""Recovery: decides after a failed attempt which node to blame, and when and where to retry.

A recovery knows neither a call's tokens nor their order. `Recoveries` holds the state that all
calls of one base model share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable

from baton.api.errors import NodeUnavailableError, error_of
from baton.link.words import (
    ADAPTER_MISSING,
    BEAT_INTERVAL_S,
    MOVED,
    NodeRole,
    RequestError,
)
from router.calls.attempt import Attempt
from router.calls.call import Call
from router.calls.recovery.pair_choice import PairChoice
from router.calls.recovery.retry_budget import CallRetries, RetryBudget, RetryOptions
from router.calls.recovery.suspects import WINDOW_S, Suspects
from router.calls.recovery.suspicion import Suspicion, begun_on
from router.fleet.fleet import Fleet
from router.fleet.node import LegDelta
from router.fleet.node_pool import NodePool
from router.policies.base import Placement

logger = logging.getLogger(__name__)

# Codes of errors after which another node may succeed: the node is lost, its peer cannot be
# reached, or its engine is broken.
_RETRYABLE = ("UNAVAILABLE", "INTERNAL")
# Within this many seconds, a silent node either sends beats again or is declared lost.
_VERDICT_S = 2.0


class Recoveries:
    """Makes a `Recovery` for each call of one base model; calls share a retry budget and suspects.

    Args:
        pool: the router's nodes.
        options: limits of each call's retries; None: the default limits.
        budget: limits the retries of all calls together; None: a default budget.

    Attributes:
        options: limits of each call's retries; new options apply to later calls only.
        suspects: the requests that may have crashed nodes.
    """

    def __init__(
        self,
        pool: NodePool,
        options: RetryOptions | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self.pool = pool
        self.options = options or RetryOptions()
        self.budget = budget or RetryBudget()
        self.suspects = Suspects(pool)

    def recover(self, call: Call, remaining_s: Callable[[], float]) -> Recovery:
        """Count a new call and return its `Recovery`."""
        self.budget.note_call()
        return Recovery(call, self, remaining_s)


class Recovery:
    """Decides whether one call is retried, when, and on which nodes.

    Args:
        shared: state that all calls of this base model share.
        remaining_s: returns the seconds until the deadline; raises if the call has been ended.

    Attributes:
        pair_timeout_s: seconds that an attempt waits when no nodes can take it.
    """

    def __init__(self, call: Call, shared: Recoveries, remaining_s: Callable[[], float]) -> None:
        self._call = call
        self._pool, self._suspects = shared.pool, shared.suspects
        self._options, self._budget = shared.options, shared.budget
        self.pair_timeout_s = shared.options.pair_timeout_s
        self._remaining_s = remaining_s
        self._retries = CallRetries(shared.options, shared.budget)
        self._choice = PairChoice()
        self._suspicion: Suspicion | None = None  # set at the first loss of a node

    # ------------------------------------------------------------------ an attempt failed

    def note_failure(self, attempt: Attempt, item: LegDelta, error: RequestError) -> None:
        """Count a failed attempt; raise its error if the call must not be retried.

        Raises NodeUnavailableError if no nodes are left that can load the call's adapter.
        """
        self._blame(attempt, item, error)
        if error.code not in (*_RETRYABLE, *MOVED):
            raise error_of(error)
        node = attempt.prefill if item.role is NodeRole.PREFILL else attempt.decode
        if error.code == ADAPTER_MISSING and node is not None:
            adapter = self._call.terms.adapter
            self._pool.adapters.bar(node.engine_id, adapter, error.message)
            if not (self._pool.can_load_adapter(adapter) or self.expected_s()):
                why = self._pool.why_no_pair(adapter=adapter)
                raise NodeUnavailableError(f"{error.message}; {why}")
        decode = attempt.decode.engine_id if attempt.decode else ""
        prefill = attempt.prefill.engine_id if attempt.prefill else ""
        self._choice.note_failure(prefill, decode, item, self._silent_of(attempt))
        self._retries.note_failure(error, functools.partial(self._is_loss, attempt, item))

    async def wait_before_retry(self, attempt: Attempt, error: RequestError) -> None:
        """Wait until the next attempt may begin.

        If a silent node may have begun the call's work, first waits until the node is known to be
        lost or alive, because a call whose node died becomes suspect. Then waits until the retry
        budget allows a retry; raises NodeUnavailableError if too many calls wait for a retry.
        """
        pool, budget = self._pool, self._budget
        loop = asyncio.get_running_loop()
        known_by = loop.time() + _VERDICT_S
        while self._has_begun_on_silent(attempt) and loop.time() < known_by:
            self._remaining_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_INTERVAL_S):
                    await pool.wait_for_change()
        self._remaining_s()
        self._suspect(attempt)
        if self._retries.needs_pause:
            await self.pause()
        if not self._retries.may_begin():
            if budget.is_storm(self._remaining_s()):
                raise NodeUnavailableError(f"{error.message} (too many retries in the cluster)")
            with budget.waiting():
                await self.pause()
                while not self._retries.may_begin():
                    await self.pause()
        logger.info("request %s is tried again: %s", self._call.request_id, error.message)

    async def pause(self) -> None:
        """Pause, longer after each failure of this call, but not past the deadline."""
        options = self._options
        exponent = min(self._retries.num_failed, 16) - 1
        pause_s = min(options.first_pause_s * 2**exponent, options.longest_pause_s)
        # A random factor keeps calls that were preempted together from returning at the same
        # moment.
        pause_s *= 0.5 + secrets.randbelow(512) / 1024
        await asyncio.sleep(min(pause_s, self._remaining_s()))

    # ------------------------------------------------------------------ the next one

    async def wait_while_suspect(self) -> None:
        """Wait until the call may be placed; only a suspect call must wait.

        Raises PoisonRequestError if the call was found to kill nodes.
        """
        if self._suspicion is not None:
            while (wait_s := self._suspicion.wait_s(self._pool.fleet)) > 0:  # noqa: ASYNC110  # ends at a time
                await asyncio.sleep(min(wait_s, self._remaining_s()))

    def narrow(self, fleet: Fleet) -> Fleet:
        """Return the nodes of ``fleet`` that suit the next attempt best.

        Returns an empty fleet if trials of other calls occupy all nodes.
        """
        if self._suspects.rooms:
            fleet = self._suspects.rooms.without(fleet, self._suspicion)
        if self._suspicion is not None:
            fleet = self._suspicion.narrow(fleet)
        return self._choice.narrow(fleet)

    def expected_s(self) -> float:
        """Return for how many seconds to wait for a node; 0 if no node is expected.

        A node is expected if a lost node may return, or if a trial occupies a node for now.
        """
        pool, options = self._pool, self._options
        trial_s = options.pair_timeout_s if self._suspects.rooms else 0.0
        return max(trial_s, pool.awaited_until(options.return_timeout_s) - pool.clock(), 0.0)

    def has_failed(self, placement: Placement) -> bool:
        """Return whether the call has failed on this pair before, or on one of its nodes."""
        return self._choice.has_failed(placement)

    def note_attempt(self, placement: Placement) -> None:
        """Note that an attempt begins on these nodes."""
        if self._suspicion is not None:
            self._suspicion.note_placed(placement)

    def note_progress(self, attempt: Attempt) -> None:
        """Note that an attempt yielded tokens, which may clear the call of suspicion."""
        if self._suspicion is not None:
            self._suspicion.note_progress(attempt)

    def close(self) -> None:
        """Note that the call has ended, and free what the recovery holds."""
        # Breaks the reference cycle with `OpenCall`, so that the call's images are freed now, not
        # at the next garbage collection.
        self._remaining_s = _no_time
        if self._suspicion is not None:
            self._suspicion.note_ended()

    # ------------------------------------------------------------------ which node is at fault

    def _silent_of(self, attempt: Attempt) -> set[str]:
        """Return the engine ids of an attempt's nodes that are silent but not declared lost."""
        pool = self._pool
        return {
            node.engine_id
            for node in attempt.nodes
            if node.is_silent and pool.node(node.engine_id) is node
        }

    def _is_loss(self, attempt: Attempt, item: LegDelta) -> bool:
        """Return whether an attempt failed because one of its nodes is lost, stuck or silent."""
        error, pool = item.delta.error, self._pool
        is_gone = any(
            pool.node(node.engine_id) is not node or node.is_stuck or node.is_silent
            for node in attempt.nodes
        )
        return item.node_lost or (is_gone and error is not None and error.code == "UNAVAILABLE")

    def _has_begun_on_silent(self, attempt: Attempt) -> bool:
        return any(begun_on(attempt, engine_id) for engine_id in self._silent_of(attempt))

    def _suspect(self, attempt: Attempt) -> None:
        """Suspect the call if nodes died during an attempt; otherwise end the call's trial."""
        pool, suspects = self._pool, self._suspects
        gone = {
            node.engine_id
            for node in attempt.nodes
            if node.is_stuck or pool.node(node.engine_id) is not node
        }
        # `lost_nodes` does not count nodes that an operator stopped.
        recent = pool.lost_nodes.lost_since(pool.clock() - WINDOW_S)
        losses = [loss for loss in recent if loss.engine_id in gone]
        if losses:
            if self._suspicion is None:
                pause_s = self._options.trial_pause_s
                self._suspicion = Suspicion(suspects, self._call, pause_s)
            self._suspicion.note_loss(attempt, losses, pool.num_pair_nodes)
        elif self._suspicion is not None:
            self._suspicion.close()

    def _blame(self, attempt: Attempt, item: LegDelta, error: RequestError) -> None:
        """Note the failure in the health of the nodes that may have caused it.

        A node with a broken engine is blamed alone. For other errors, both nodes are blamed,
        because either may have failed. Nodes that are lost or out of memory are not blamed.
        """
        prefill, decode = attempt.prefill, attempt.decode
        if error.code not in _RETRYABLE or self._is_loss(attempt, item):
            return
        if error.code == "INTERNAL" or prefill is None or decode is None:
            node = prefill if item.role is NodeRole.PREFILL else decode
            if node is not None:
                node.health.note_failure("", error.message)
            return
        prefill.health.note_failure(decode.engine_id, error.message)
        decode.health.note_failure(prefill.engine_id, error.message)


def _no_time() -> float:
    """Return 0 seconds: a call that has ended has no time left."""
    return 0.0
