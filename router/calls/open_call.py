"""OpenCall: a call, its attempts one after the other, and the one stream that they make."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator

import msgspec

from baton.api.errors import NodeUnavailableError
from baton.api.outputs import Receipt, TextDelta
from baton.checkpoint.model_identity import Identity
from baton.link.words import BEAT_INTERVAL_S, NodeRole, RequestError, failed_delta
from router.calls.attempt import Attempt
from router.calls.call import Call
from router.calls.output_buffer import OutputBuffer
from router.calls.pair_choice import PairChoice
from router.calls.placing import Placer
from router.calls.request_log import Following
from router.calls.retry_budget import CallRetries, RetryBudget, RetryOptions
from router.calls.suspects import WINDOW_S, Suspects
from router.calls.suspicion import Suspicion, had_begun
from router.calls.wake_ups import WakeUps
from router.fleet.call_errors import error_of
from router.fleet.fleet import Fleet
from router.fleet.node import LegDelta
from router.fleet.node_pool import NodePool
from router.policies.base import Placement

logger = logging.getLogger(__name__)

# A node that is gone, cannot reach its peer, or has an engine that cannot continue: another may.
_RETRYABLE = ("UNAVAILABLE", "INTERNAL")
# Within it a silent node is heard again, or the router says that it is lost.
_VERDICT_S = 2.0
_DEADLINE = RequestError("DEADLINE_EXCEEDED", "the request's deadline passed")


class OpenCall:
    """A call, its attempts one after the other, and the one stream that they make."""

    def __init__(
        self,
        call: Call,
        following: Following,
        *,
        pool: NodePool,
        placer: Placer,
        suspects: Suspects,
        options: RetryOptions,
        budget: RetryBudget,
        wake_ups: WakeUps,
        epochs: Iterator[int],
    ) -> None:
        self.following = following
        self._pool = pool
        self._placer = placer
        self._suspects = suspects
        self._options = options
        self._budget = budget
        self._epochs = epochs
        self._call = call
        self._buffer = OutputBuffer(call.request_id, wake_ups)
        self._output_token_ids = self._buffer.token_ids
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._retries = CallRetries(options, budget)
        self._choice = PairChoice()
        self._suspicion: Suspicion | None = None  # since the first loss of a node
        self._identity: Identity = ()  # of the nodes that its tokens are of
        self._ttft_s = 0.0
        self._ended_by: RequestError | None = None  # from outside
        self._router_queue_s = 0.0
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + call.timeout_s
        self._deadline = loop.call_at(self._expires_at, self.end, _DEADLINE)

    async def outputs(self) -> AsyncGenerator[TextDelta, None]:
        """Yield what the legs of all attempts say, strictly by output index; no texts.

        All that came while the reader was busy is one output.
        """
        buffer = self._buffer
        attempt = await self._begin("")
        while True:
            await buffer.wait()
            output = buffer.take()
            if self._suspicion is not None:
                self._suspicion.note_progress(attempt)
            if output is not None:
                if output.output_index == 0:
                    self._ttft_s = time.perf_counter() - self._call.received_at
                if output.finish_reason is not None:
                    yield msgspec.structs.replace(output, receipt=self.receipt())
                    return
                yield output
            elif buffer.failure is not None:
                failure, buffer.failure = buffer.failure, None
                assert failure.delta.error is not None
                self._check_retry(attempt, failure)
                await self._wait_for_turn(attempt, failure.delta.error)
                attempt = await self._begin(failure.delta.error.message)

    def receipt(self) -> Receipt:
        """What the call cost up to now; the decode node's part comes with its last token."""
        attempt = self._attempt
        return Receipt(
            num_prompt_tokens=len(self._call.prompt_token_ids),
            num_output_tokens=len(self._output_token_ids),
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self._call.received_at,
            prefill_node=attempt.prefill.name if attempt and attempt.prefill else "",
            decode_node=attempt.decode.name
            if attempt and attempt.decode and attempt.decoded
            else "",
            prefill=attempt.prefill_receipt if attempt else None,
            decode=self._buffer.decode_receipt,
            num_attempts=self._num_attempts,
            router_queue_s=self._router_queue_s,
        )

    def close(self) -> None:
        """End what may still be open, on the nodes too."""
        self._deadline.cancel()
        if self._attempt is not None:
            self._attempt.close()
        if self._suspicion is not None:
            self._suspicion.close()

    def end(self, error: RequestError) -> None:
        """End the call from outside, whatever it is doing."""
        self._ended_by = error
        if self._attempt is not None:
            delta = failed_delta(self._call.request_id, self._attempt.epoch, error)
            self._attempt.fail(LegDelta(NodeRole.DECODE, delta))  # the leg that ends the call

    # ------------------------------------------------------------------ attempts

    def _check_retry(self, attempt: Attempt, item: LegDelta) -> None:
        """Count a failed attempt; raises its error if there must be no other."""
        error = item.delta.error
        assert error is not None
        decode = attempt.decode.engine_id if attempt.decode else ""
        prefill = attempt.prefill.engine_id if attempt.prefill else ""
        self._choice.note_failure(prefill, decode, item, self._silent_of(attempt))
        if self._ended_by is not None:  # it is no node's fault
            raise error_of(self._ended_by)
        self._blame(attempt, item, error)
        self.following.note_failure(error.code, error.message)
        if error.code not in (*_RETRYABLE, "PREEMPTED"):
            raise error_of(error)
        self._retries.note_failure(error, functools.partial(self._is_loss, attempt, item))

    async def _wait_for_turn(self, attempt: Attempt, error: RequestError) -> None:
        """Wait until a silent node is known to be lost, or not, and the budget has a retry left.

        What a silent node cannot have begun to compute does not wait for that: it is no suspect.
        """
        pool, budget = self._pool, self._budget
        known_by = asyncio.get_running_loop().time() + _VERDICT_S
        while had_begun(attempt, self._silent_of(attempt)):
            until = min(known_by, self._expires_at)
            if asyncio.get_running_loop().time() >= until:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_INTERVAL_S):
                    await pool.wait_for_change()
        self._remaining_s()
        self._suspect(attempt)
        if self._retries.needs_pause:
            await self._pause()
        if not self._retries.may_begin():
            if budget.is_storm(self._remaining_s()):
                raise NodeUnavailableError(f"{error.message} (too many retries in the cluster)")
            with budget.waiting():
                await self._pause()
                while not self._retries.may_begin():
                    await self._pause()
        logger.info("request %s is tried again: %s", self._call.request_id, error.message)

    def _silent_of(self, attempt: Attempt) -> set[str]:
        """Engine ids of an attempt's nodes of which nothing is heard, and not known to be lost."""
        pool = self._pool
        nodes = filter(None, (attempt.prefill, attempt.decode))
        return {
            node.engine_id for node in nodes if node.is_silent and pool.node(node.engine_id) is node
        }

    def _is_loss(self, attempt: Attempt, item: LegDelta) -> bool:
        """Whether an attempt failed because one of its nodes is gone or silent, whoever said so."""
        error, pool = item.delta.error, self._pool
        nodes = [node for node in (attempt.prefill, attempt.decode) if node is not None]
        is_gone = any(
            pool.node(node.engine_id) is not node or node.is_stuck or node.is_silent
            for node in nodes
        )
        return item.node_lost or (is_gone and error is not None and error.code == "UNAVAILABLE")

    def _suspect(self, attempt: Attempt) -> None:
        """Note which nodes died under an attempt; raises PoisonRequestError if it is why."""
        pool, suspects = self._pool, self._suspects
        lost = {
            node.engine_id
            for node in filter(None, (attempt.prefill, attempt.decode))
            if node.is_stuck or pool.node(node.engine_id) is not node
        }
        lost &= pool.lost_nodes.lost_since(pool.clock() - WINDOW_S)  # not by an operator
        if lost:
            if self._suspicion is None:
                pause_s = self._options.trial_pause_s
                self._suspicion = Suspicion(suspects, self._call, pause_s)
            self._suspicion.note_loss(attempt, lost, len(pool.nodes))
        elif self._suspicion is not None:
            self._suspicion.close()

    def _blame(self, attempt: Attempt, item: LegDelta, error: RequestError) -> None:
        """Tell the health of the nodes that an attempt failed.

        One whose engine cannot continue is at fault alone; what else is wrong may be the other's
        fault. One that is lost is gone anyway, and being short of memory is no fault.
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

    async def _begin(self, failure: str) -> Attempt:
        """Begin an attempt behind the tokens that the client has.

        Args:
            failure: of the attempt before.
        """
        call, pool = self._call, self._pool
        placement = await self._wait_for_placement(failure)
        if self._choice.has_failed(placement):  # nothing better is left: give it some time
            await self._pause()
            placement = await self._wait_for_placement(failure)
        if self._suspicion is not None:
            self._suspicion.begin(placement)
        prefill = pool.node(placement.prefill.engine_id) if placement.prefill else None
        decode = pool.node(placement.decode.engine_id)
        assert decode is not None
        assert prefill is not None or placement.prefill is None
        if self._output_token_ids and decode.identity != self._identity:
            raise NodeUnavailableError(
                f"{failure}; its first {len(self._output_token_ids)} tokens are of a model that is "
                "no longer served here"
            )
        self._identity = decode.identity
        # The prefill node samples the next token: when there is none behind, nobody else is asked.
        num_left = call.sampling_params.max_tokens - len(self._output_token_ids)
        nodes = filter(None, (placement.prefill, placement.decode))
        room = pool.max_len_at(nodes) - self._num_tokens
        ends_with_next = min(num_left, room) <= 1
        self._num_attempts += 1
        used_decode = None if ends_with_next and prefill is not None else decode
        noted = self.following.note_attempt(
            prefill.name if prefill else "", used_decode.name if used_decode else ""
        )
        if not self._output_token_ids:
            self._router_queue_s = noted.began_s
        self._attempt = Attempt(
            call,
            prefill,
            used_decode,
            num_cached_tokens=placement.num_cached_tokens,
            epoch=next(self._epochs) % 2**32,
            timeout_s=self._remaining_s(),
            buffer=self._buffer,
            trace=noted.trace,
        )
        return self._attempt

    async def _wait_for_placement(self, failure: str) -> Placement:
        """Where the next attempt goes; waits for nodes if there are none now."""
        loop, num_tokens = asyncio.get_running_loop(), self._num_tokens + 1
        give_up_at = min(loop.time() + self._options.pair_timeout_s, self._expires_at)
        if self._suspicion is not None:
            while (wait_s := self._suspicion.wait_s(self._pool.fleet)) > 0:  # noqa: ASYNC110  # its end is a time
                await asyncio.sleep(min(wait_s, self._remaining_s()))
        while (placement := self._place()) is None:
            self._remaining_s()
            await self._placer.wait_for_change(failure, num_tokens, give_up_at)
        self._remaining_s()
        return placement

    def _place(self) -> Placement | None:
        return self._placer.place(
            self._call,
            self._output_token_ids,
            remaining_s=self._expires_at - asyncio.get_running_loop().time(),
            narrow=self._narrow,
            is_first=self._num_attempts == 0,
        )

    def _narrow(self, fleet: Fleet) -> Fleet:
        if self._suspicion is not None:
            fleet = self._suspicion.narrow(fleet)
        return self._choice.narrow(fleet)

    @property
    def _num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self._call.prompt_token_ids) + len(self._output_token_ids)

    async def _pause(self) -> None:
        """Back off, the longer the more often this call failed; not past the deadline."""
        options = self._options
        exponent = min(self._retries.num_failed, 16) - 1
        pause_s = min(options.first_pause_s * 2**exponent, options.longest_pause_s)
        # Not all at once: those that were preempted together would be so again.
        pause_s *= 0.5 + secrets.randbelow(512) / 1024
        await asyncio.sleep(min(pause_s, self._remaining_s()))

    def _remaining_s(self) -> float:
        """Until the deadline; raises the error of a call that was ended."""
        remaining_s = self._expires_at - asyncio.get_running_loop().time()
        if self._ended_by is not None or remaining_s <= 0:
            raise error_of(self._ended_by or _DEADLINE)
        return remaining_s
