"""OpenCall: one call in progress: its attempts, one after another, and their joint stream.

`router/calls/recovery/` decides what follows a failed attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator

import msgspec

from baton.api.errors import NodeUnavailableError, error_of
from baton.api.outputs import Receipt, TextDelta
from baton.link.words import NodeRole, RequestError, failed_delta
from router.calls.attempt import Attempt
from router.calls.call import AttemptTerms, Call
from router.calls.output_buffer import OutputBuffer
from router.calls.placing import MAX_EXPECTING, Placer
from router.calls.recovery.recovery import Recoveries
from router.calls.request_log import Following
from router.calls.wake_ups import Turns, WakeUps
from router.fleet.node import LegDelta, Node
from router.fleet.node_pool import NodePool
from router.policies.base import Placement

_DEADLINE = RequestError("DEADLINE_EXCEEDED", "the request's deadline passed")


class OpenCall:
    """Runs one call's attempts one after another, and joins their tokens into one stream.

    Args:
        following: writes the call's record in the request log.
    """

    def __init__(
        self,
        call: Call,
        following: Following,
        *,
        pool: NodePool,
        placer: Placer,
        recoveries: Recoveries,
        wake_ups: WakeUps,
        turns: Turns,
        epochs: Iterator[int],
    ) -> None:
        self.following = following
        self._pool = pool
        self._placer, self._turns = placer, turns
        self._epochs = epochs
        self._call = call
        self._buffer = OutputBuffer(call.request_id, wake_ups)
        self._output_token_ids = self._buffer.token_ids
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._recovery = recoveries.recover(call, self._remaining_s)
        self._decode: Node | None = None  # decode node of the last attempt
        self._ttft_s = 0.0
        self._first_read_s = 0.0  # seconds from arrival until a node sent the first token
        # Set if the call is ended by an abort, its deadline or the router's end.
        self._ended_by: RequestError | None = None
        self._router_queue_s = 0.0
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + call.timeout_s
        self._deadline = loop.call_at(self._expires_at, self.end_with_error, _DEADLINE)

    async def outputs(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the tokens of all attempts in output order, without text.

        Tokens that arrive while the reader is busy come as one delta.
        """
        buffer = self._buffer
        attempt = await self._begin("")
        while True:
            await buffer.wait()
            output = buffer.pop_delta()
            self._recovery.note_progress(attempt)
            if output is not None:
                if output.output_index == 0:
                    self._first_read_s = attempt.began_at - self._call.terms.received_at
                    self.note_ttft()
                if output.finish_reason is not None:
                    yield msgspec.structs.replace(output, receipt=self.receipt())
                    return
                yield output
            elif buffer.failure is not None:
                failure, buffer.failure = buffer.failure, None
                error = failure.delta.error
                assert error is not None
                # The call was ended on purpose, so no node is blamed
                if self._ended_by is not None:
                    raise error_of(self._ended_by)
                self.following.note_failure(error.code, error.message)
                self._recovery.note_failure(attempt, failure, error)
                await self._recovery.wait_before_retry(attempt, error)
                attempt = await self._begin(error.message)

    def note_ttft(self) -> None:
        """Record the time to first token, when token 1 is passed on to the client.

        Later calls of this function replace the recorded time.
        """
        self._ttft_s = time.perf_counter() - self._call.terms.received_at

    def receipt(self) -> Receipt:
        """Return the receipt so far; the decode node's part is known only at the last token."""
        attempt = self._attempt
        return Receipt(
            num_prompt_tokens=len(self._call.prompt_token_ids),
            num_output_tokens=len(self._output_token_ids),
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self._call.terms.received_at,
            prefill_node=attempt.prefill.name if attempt and attempt.prefill else "",
            decode_node=(
                attempt.decode.name if attempt and attempt.decode and attempt.decoded else ""
            ),
            prefill=attempt.prefill_receipt if attempt else None,
            decode=self._buffer.decode_receipt,
            num_attempts=self._num_attempts,
            router_queue_s=self._router_queue_s,
            accept_s=self.following.accepted_s,
            delivery_s=self._ttft_s - self._first_read_s,
            model=self._call.terms.model,
            adapter=self._call.terms.adapter,
            num_images=len(self._call.images),
            num_image_tokens=sum(span.num_tokens for span in self._call.image_spans),
            weights=attempt.weights if attempt else "",
        )

    def close(self) -> None:
        """End the current attempt on the router and its nodes."""
        self._deadline.cancel()
        if self._attempt is not None:
            self._attempt.close()
        self._recovery.close()

    def end_with_error(self, error: RequestError) -> None:
        """End the call with an error, whether the call runs or waits."""
        self._ended_by = error
        if self._attempt is not None:
            delta = failed_delta(self._call.request_id, self._attempt.epoch, error)
            # The role is arbitrary: `outputs` raises `_ended_by` and blames no node.
            self._attempt.fail(LegDelta(NodeRole.DECODE, delta))

    # ------------------------------------------------------------------ attempts

    async def _begin(self, failure: str) -> Attempt:
        """Begin an attempt that continues after the tokens of earlier attempts.

        Args:
            failure: why the previous attempt failed; empty for the first attempt.
        """
        call, pool = self._call, self._pool
        placement = await self._wait_for_placement(failure)
        # Only nodes that failed this call are left: pause, then place again
        if self._recovery.has_failed(placement):
            await self._recovery.pause()
            placement = await self._wait_for_placement(failure)
        self._recovery.note_attempt(placement)
        prefill = pool.node(placement.prefill.engine_id) if placement.prefill else None
        decode = pool.node(placement.decode.engine_id)
        assert decode is not None
        assert prefill is not None or placement.prefill is None
        last = self._decode
        if last is not None and self._output_token_ids and decode.identity != last.identity:
            raise NodeUnavailableError(
                f"{failure}; its first {len(self._output_token_ids)} tokens are of a model that is "
                "no longer served here"
            )
        self._decode = decode
        # The prefill node samples the next token. If this token is the output's last one, no decode
        # node is needed.
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
        epoch, num_cached = next(self._epochs) % 2**32, placement.num_cached_tokens
        terms = AttemptTerms(
            epoch=epoch,
            timeout_s=self._remaining_s(),
            supply=self._placer.plan_supply(
                call, self._output_token_ids, prefill, decode, epoch, num_cached
            ),
            num_cached_tokens=num_cached,
            trace=noted.trace,
            adapter_source=pool.adapters.source_of(call.terms.adapter),
        )
        self._attempt = Attempt(call, prefill, used_decode, self._buffer, terms)
        self._placer.note_forecast(call, prefill or decode, epoch)
        return self._attempt

    async def _wait_for_placement(self, failure: str) -> Placement:
        """Return the placement of the next attempt; wait if no node can take the call now.

        Raises NodeUnavailableError if no node can take the call in time, or if none is expected to.
        """
        loop, num_tokens = asyncio.get_running_loop(), self._num_tokens + 1
        give_up_at = loop.time() + self._recovery.pair_timeout_s
        await self._recovery.wait_while_suspect()
        if self._num_attempts:  # a first attempt had its turn when it passed the gate
            await self._turns.wait_for_turn()
        while (placement := self._place()) is None:
            self._remaining_s()
            if self._placer.num_waiting < MAX_EXPECTING:
                give_up_at = max(give_up_at, loop.time() + self._recovery.expected_s())
            until = min(give_up_at, self._expires_at)
            call = self._call
            await self._placer.wait_for_change(
                failure,
                num_tokens,
                until,
                call.terms.adapter,
                has_images=bool(call.images),
                pools=call.pooling is not None,
            )
            await self._recovery.wait_while_suspect()
            await self._turns.wait_for_turn()
        self._remaining_s()
        return placement

    def _place(self) -> Placement | None:
        return self._placer.place(
            self._call,
            self._output_token_ids,
            remaining_s=self._expires_at - asyncio.get_running_loop().time(),
            narrow=self._recovery.narrow,
            is_first=self._num_attempts == 0,
        )

    @property
    def _num_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self._call.prompt_token_ids) + len(self._output_token_ids)

    def _remaining_s(self) -> float:
        """Return the seconds until the deadline.

        Raises the error that ended the call, or DeadlineExceededError if the deadline has passed.
        """
        remaining_s = self._expires_at - asyncio.get_running_loop().time()
        if self._ended_by is not None or remaining_s <= 0:
            raise error_of(self._ended_by or _DEADLINE)
        return remaining_s
