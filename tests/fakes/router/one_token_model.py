"""A model behind calls of one token, for beam searches: next tokens are drawn by the prefix."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncGenerator, Sequence

from baton.api.beam_search import TopTokens
from baton.api.errors import BatonError
from baton.api.outputs import FinishReason, Receipt, TextDelta, TokenLogprobs
from router.calls.call import Call

RECEIPT = Receipt(
    num_prompt_tokens=3, num_output_tokens=1, ttft_s=0.1, total_s=0.1, prefill_node="p",
    decode_node="", prefill=None, decode=None,
)  # fmt: skip


def best(prefix: Sequence[int], num: int, weights: str = "") -> TopTokens:
    """A model: next tokens drawn by the prefix, and by the version of the weights."""
    draw = random.Random(repr(list(prefix)) + weights)
    tokens = draw.sample(range(20), num)
    return list(zip(tokens, sorted((-draw.random() for _ in tokens), reverse=True), strict=True))


class OneTokenModel:
    """Runs calls of one token; counts those that are open.

    Args:
        changes_at: number of calls after which the weights have the version "new"; None: never.
    """

    def __init__(
        self,
        error: BatonError | None = None,
        *,
        hangs: bool = False,
        changes_at: int | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.num_open = 0
        self.is_waiting = asyncio.Event()
        self._error, self._hangs, self._changes_at = error, hangs, changes_at

    async def run(self, call: Call) -> AsyncGenerator[TextDelta, None]:
        self.calls.append(call)
        self.num_open += 1
        is_new = self._changes_at is not None and len(self.calls) > self._changes_at
        weights = "new" if is_new else ""
        try:
            await asyncio.sleep(0)
            if len(self.calls) > 5 and self._error is not None:
                raise self._error
            if len(self.calls) > 5 and self._hangs:
                self.is_waiting.set()
                await asyncio.sleep(3600)
            num = call.sampling_params.logprobs
            assert num is not None
            top = tuple(best(call.prompt_token_ids, num, weights))
            token_id, logprob = top[0]
            logprobs = (TokenLogprobs(logprob, top),)
            yield TextDelta(
                call.request_id, 0, (token_id,), finish_reason=FinishReason.LENGTH,
                receipt=dataclasses.replace(RECEIPT, weights=weights), logprobs=logprobs,
            )  # fmt: skip
        finally:
            self.num_open -= 1
