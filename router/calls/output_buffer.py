"""DeltaOrder and OutputBuffer: carry a call's output from its nodes to its one reader.

    deltas of an attempt's two legs -> DeltaOrder -> OutputBuffer -> the reader

`DeltaOrder` passes each token on once. `OutputBuffer` never makes a node wait. The buffer stores
tokens and not messages, so a reader that was slow gets all tokens that arrived meanwhile as one
piece.
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Iterator

import msgspec

from baton.api.outputs import DecodeReceipt, FinishReason, TextDelta, TokenLogprobs
from baton.link.words import RequestDelta
from router.calls.wake_ups import WakeUps
from router.fleet.node import LegDelta

# Maximum number of deltas that are kept because earlier tokens are missing. While one node's link
# stalls, until the node counts as silent, the other node goes on.
MAX_EARLY = 4096
# Maximum number of tokens in one piece: turning more tokens into text at once would block the event
# loop for tens of milliseconds.
MAX_TAKEN = 1024


class DeltaOrder:
    """Passes each token of an attempt on once and in output order; drops duplicates.

    Args:
        next_index: output index of the attempt's first token.
        end_index: index after the last output token that the request may have.
    """

    def __init__(self, next_index: int, end_index: int = 2**32) -> None:
        self.next_index = next_index
        self._end_index = end_index
        # Deltas that wait for earlier tokens, by output index
        self._early: dict[int, LegDelta] = {}
        self._indexes: list[int] = []  # output indexes of the waiting deltas, as a heap

    def admits(self, item: LegDelta) -> bool:
        """Return whether a delta lies within the output, and not too many deltas wait already."""
        delta = item.delta
        is_within = delta.output_index + max(len(delta.token_ids), 1) <= self._end_index
        return is_within and len(self._early) < MAX_EARLY

    def push_next(self, output_index: int) -> bool:
        """Count one token as passed on, if it is the next one and no delta waits.

        Returns whether the token was counted; if not, the caller must push it as a delta.
        """
        if output_index != self.next_index or self._early or output_index >= self._end_index:
            return False
        self.next_index += 1
        return True

    def push(self, item: LegDelta) -> Iterator[LegDelta]:
        """Add a delta without an error; yield all deltas that are now next in order."""
        index = item.delta.output_index
        if index not in self._early:
            self._early[index] = item
            heapq.heappush(self._indexes, index)
        while self._indexes and self._indexes[0] <= self.next_index:
            ready = self._new_part(self._early.pop(heapq.heappop(self._indexes)))
            if ready is not None:
                self.next_index += len(ready.delta.token_ids)
                yield ready

    def _new_part(self, item: LegDelta) -> LegDelta | None:
        """Return the part of a delta with tokens that were not passed on yet, or None."""
        delta = item.delta
        num_forwarded = self.next_index - delta.output_index
        if num_forwarded == 0:
            return item
        if num_forwarded >= len(delta.token_ids):
            return None
        rest = msgspec.structs.replace(
            delta,
            output_index=self.next_index,
            token_ids=delta.token_ids[num_forwarded:],
            logprobs=delta.logprobs[num_forwarded:],
        )
        return msgspec.structs.replace(item, delta=rest)


class OutputBuffer:
    """The output of a call, passed from its attempts, one after another, to one reader.

    Args:
        wake_ups: wakes the reader in waves. For the first token, the last one and failures, the
            reader is woken at once.

    token_ids  [ taken by the reader | not taken yet ]
                                     ^ _num_taken

    Attributes:
        token_ids: the whole output so far.
        decode_receipt: the decode node's receipt; None until the last token arrives.
        failure: why the attempt ended; the reader must clear it before the next attempt adds
            tokens.
    """

    def __init__(self, request_id: str, wake_ups: WakeUps) -> None:
        self.token_ids = array("I")
        self.decode_receipt: DecodeReceipt | None = None
        self.failure: LegDelta | None = None
        self._request_id = request_id
        self._wake_ups = wake_ups
        self._num_taken = 0
        self._has_rest = False  # whether the reader's last piece was full, so that tokens are left
        self._finish_reason: FinishReason | None = None
        self._pooled = b""
        self._logprobs: list[TokenLogprobs] = []  # logprobs of tokens that the reader has not read
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        # Set while the reader waits and no token is there
        self._waiter: asyncio.Future[None] | None = None
        self._sleeper: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ the writer

    def add_token(self, token_id: int) -> None:
        """Add the next token, without logprobs and finish reason; the reader wakes with a wave."""
        self.token_ids.append(token_id)
        if self._waiter is not None:
            self._wake_ups.add_waiter(self._waiter)
            self._waiter = None

    def add_delta(self, delta: RequestDelta) -> None:
        """Add the next tokens with logprobs, receipt and finish reason; wake the reader at once."""
        self.token_ids.extend(delta.token_ids)
        self._logprobs += delta.logprobs
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        self._finish_reason = delta.finish_reason
        self._pooled = delta.pooled
        self.decode_receipt = delta.decode
        self._wake()

    def fail(self, item: LegDelta) -> None:
        """Note that the attempt failed; the reader first gets the tokens that arrived before."""
        self.failure = item
        self._wake()

    def _wake(self) -> None:
        """Wake the reader at once, even if it already waits for the next wave."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    # ------------------------------------------------------------------ the reader

    async def wait(self) -> None:
        """Wait until a failure, or tokens and the next collective wake-up, wake the reader."""
        if self._has_rest:
            await asyncio.sleep(0)  # let other tasks run between two full pieces
            return
        if self._finish_reason or self.failure or (self._num_pending and not self._num_taken):
            return
        self._sleeper = asyncio.get_running_loop().create_future()
        if self._num_pending:
            self._wake_ups.add_waiter(self._sleeper)
        else:
            self._waiter = self._sleeper
        try:
            await self._sleeper
        finally:
            self._waiter = self._sleeper = None

    def pop_delta(self) -> TextDelta | None:
        """Return the tokens that arrived since the last call as one delta without text.

        Returns at most `MAX_TAKEN` tokens; the next call returns the rest. Returns None if no token
        arrived and the output has not ended.
        """
        if not self._num_pending and self._finish_reason is None:
            return None
        first = self._num_taken
        # Logprobs are incomplete, because a node sent some tokens without them
        if len(self._logprobs) != self._num_pending:
            self._logprobs.clear()
        self._num_taken = min(first + MAX_TAKEN, len(self.token_ids))
        self._has_rest = self._num_pending > 0
        token_ids = tuple(self.token_ids[first : self._num_taken])
        logprobs, prompt_logprobs = tuple(self._logprobs[: len(token_ids)]), self._prompt_logprobs
        if logprobs or prompt_logprobs:
            del self._logprobs[: len(logprobs)]
            self._prompt_logprobs = ()
        return TextDelta(
            self._request_id,
            first,
            token_ids,
            finish_reason=None if self._has_rest else self._finish_reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=self._pooled,
        )

    @property
    def _num_pending(self) -> int:
        return len(self.token_ids) - self._num_taken
