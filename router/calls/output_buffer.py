"""OutputBuffer: a call's output between the nodes, which never wait, and its one reader.

Keeps tokens, not messages: however far the reader is behind, what it has not taken is one piece,
and no larger than the output itself. Knows neither attempts nor order: what comes in is next.
"""

from __future__ import annotations

import asyncio
from array import array

from baton.api.outputs import DecodeReceipt, FinishReason, TextDelta, TokenLogprobs
from baton.link.words import RequestDelta
from router.calls.wake_ups import WakeUps
from router.fleet.node import LegDelta

# Tokens of one piece: to make text of more takes tens of milliseconds of the event loop.
MAX_TAKEN = 1024


class OutputBuffer:
    """One writer at a time, one reader.

    Args:
        wake_ups: when the reader hears of tokens. It hears of the first one, the last one and of
            failures at once.

    token_ids  [ taken by the reader | not taken yet ]
                                     ^ _num_taken

    Attributes:
        token_ids: all of the output so far.
        decode_receipt: came with the last token.
        failure: what ended the attempt; nothing comes in until the reader has cleared it.
    """

    def __init__(self, request_id: str, wake_ups: WakeUps) -> None:
        self.token_ids = array("I")
        self.decode_receipt: DecodeReceipt | None = None
        self.failure: LegDelta | None = None
        self._request_id = request_id
        self._wake_ups = wake_ups
        self._num_taken = 0
        self._has_rest = False  # the last piece was not all that there was
        self._finish_reason: FinishReason | None = None
        self._logprobs: list[TokenLogprobs] = []  # of what is not taken yet
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._waiter: asyncio.Future[None] | None = None  # nobody has asked to wake it yet
        self._sleeper: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ the writer

    def add_token(self, token_id: int) -> None:
        """The next token, with nothing else to it."""
        self.token_ids.append(token_id)
        if self._waiter is not None:
            self._wake_ups.add(self._waiter)
            self._waiter = None

    def add(self, delta: RequestDelta) -> None:
        """The next tokens and what came with them."""
        self.token_ids.extend(delta.token_ids)
        self._logprobs += delta.logprobs
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        self._finish_reason = delta.finish_reason
        self.decode_receipt = delta.decode
        self._wake()

    def fail(self, item: LegDelta) -> None:
        """The attempt ended with an error; the reader hears it behind the tokens before."""
        self.failure = item
        self._wake()

    def _wake(self) -> None:
        """At once, also when it would be woken soon."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    # ------------------------------------------------------------------ the reader

    async def wait(self) -> None:
        """Wait until there is something to take, and time for it, or a failure."""
        if self._has_rest:
            await asyncio.sleep(0)  # others' turn
            return
        if self._finish_reason or self.failure or (self._num_pending and not self._num_taken):
            return
        self._sleeper = asyncio.get_running_loop().create_future()
        if self._num_pending:
            self._wake_ups.add(self._sleeper)
        else:
            self._waiter = self._sleeper
        try:
            await self._sleeper
        finally:
            self._waiter = self._sleeper = None

    def take(self) -> TextDelta | None:
        """Take what came since the last time, as one, without text; None if nothing did.

        Of more than `MAX_TAKEN` tokens the others are for the next time.
        """
        if not self._num_pending and self._finish_reason is None:
            return None
        first = self._num_taken
        if len(self._logprobs) != self._num_pending:  # a node gave some tokens without
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
        )

    @property
    def _num_pending(self) -> int:
        return len(self.token_ids) - self._num_taken
