"""A client with a known right answer; it compares each piece of its stream with this answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.api.errors import BatonError
from baton.api.outputs import FinishReason, TokenLogprobs
from router.calls.call import Call
from router.calls.dispatcher import Dispatcher


@dataclass(slots=True)
class Client:
    """A call, with the pieces that its client received.

    Attributes:
        expected: all tokens, and why they end.
        may_read: cleared while the client is slow.
        logprobs: logprobs of the tokens that came so far.
        left: whether the client ended the call.
        num_cached_tokens: cached tokens of the prompt, as the receipt says.
        num_attempts: attempts, as the receipt says.
    """

    call: Call
    expected: tuple[tuple[int, ...], FinishReason]
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: BatonError | None = None
    left: bool = False
    num_cached_tokens: int = 0
    num_attempts: int = 0
    task: asyncio.Task[None] | None = None

    async def read(self, dispatcher: Dispatcher) -> None:
        """Read the stream to its end; assert that each piece is the next one and right."""
        try:
            async with contextlib.aclosing(dispatcher.run(self.call)) as outputs:
                async for item in outputs:
                    assert self.finish_reason is None, "an output behind the last"
                    assert item.request_id == self.call.request_id
                    assert item.output_index == len(self.token_ids), "a gap or a repeat"
                    self.token_ids += item.token_ids
                    self.logprobs += item.logprobs
                    self.finish_reason = item.finish_reason
                    found, (expected, _) = tuple(self.token_ids), self.expected
                    assert found == expected[: len(found)], f"{found} of {expected}"
                    assert (item.receipt is None) == (self.finish_reason is None)
                    if item.receipt is not None:
                        self.num_cached_tokens = item.receipt.num_cached_tokens
                        self.num_attempts = item.receipt.num_attempts
                    await self.may_read.wait()
        except BatonError as error:
            assert self.finish_reason is None, "an error behind the last output"
            self.error = error
            return
        output = (tuple(self.token_ids), self.finish_reason)
        assert output == self.expected, f"{output}, not {self.expected}"

    def check_cached(self, clients: Iterable[Client]) -> None:
        """Assert that calls with the same salt had computed all of the prompt's cached tokens."""
        prompt = self.call.prompt_token_ids
        known = [
            [*client.call.prompt_token_ids, *client.expected[0]]
            for client in clients
            if client is not self and client.call.cache_salt == self.call.cache_salt
        ]
        if self.num_attempts > 1:  # its earlier attempts, too
            known.append(prompt)
        most = max((num_equal(prompt, other) for other in known), default=0)
        assert self.num_cached_tokens <= most, (
            f"{self.call.request_id} found {self.num_cached_tokens} of {len(prompt)} cached; "
            f"others computed {most} of them; {self.num_attempts} attempts"
        )

    @property
    def is_done(self) -> bool:
        return self.task is not None and self.task.done()

    def check(self) -> None:
        """Raise the error of the stream, if any."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common before they differ."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
