"""Answer: collects the output of one offline request.

When an answer has ended, the caller must end its request in the engine. Refuses to know: engines.
"""

from __future__ import annotations

import time

from baton.api.errors import BatonError
from baton.api.outputs import (
    Completion,
    FinishReason,
    RequestDelta,
    RequestMetrics,
    TextDelta,
    TokenLogprobs,
)
from baton.text.stop_strings import OutputText
from baton.text.tokenizer import Tokenizer
from engine.core.request import Request


class Answer:
    """The output that one request has so far.

    Args:
        choice_index: index of this output among the outputs of its prompt (``SamplingParams.n``).
        streams: whether the caller reads the text piece by piece. If False, and there are no stop
            strings, the text is decoded once at the end, which is cheaper.
        weights: version (digest) of the weights that compute the request.

    Attributes:
        ended: whether the engine or a stop string has ended the answer.
        error: why the engine cannot continue the request; None: it can.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        *,
        choice_index: int = 0,
        streams: bool,
        weights: str = "",
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.error: BatonError | None = None
        self._choice_index = choice_index
        self._tokenizer = tokenizer
        looks_at_text = tokenizer is not None and (streams or params.stop)
        self._text = OutputText(tokenizer, params) if tokenizer and looks_at_text else None
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._finish_reason: FinishReason | None = None
        self._streams, self._weights = streams, weights
        self._unread: list[TextDelta] = []
        self._began_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._began_at

    @property
    def ended(self) -> bool:
        return self._finish_reason is not None

    def on_delta(self, output: RequestDelta) -> None:
        """Add the new tokens of a step, which may end the answer."""
        token_ids, finish_reason = output.token_ids, output.finish_reason
        piece = ""
        if self._text is not None:
            piece = self._text.push(token_ids, last=finish_reason is not None)
            if self._text.stopped:
                token_ids = token_ids[: self._text.num_tokens - output.output_index]
                finish_reason = FinishReason.STOP
        logprobs = output.logprobs[: len(token_ids)]
        self._pieces.append(piece)
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._finish_reason = finish_reason
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        if self._streams:
            self._unread.append(
                TextDelta(
                    output.request_id,
                    output.output_index,
                    token_ids,
                    piece,
                    finish_reason,
                    logprobs=logprobs,
                    choice_index=self._choice_index,
                    prompt_logprobs=output.prompt_logprobs,
                    stop_string=self._text.stop_string if self._text is not None else None,
                )
            )

    def end_early(self, error: BatonError | None = None) -> None:
        """End the answer early, with the tokens that it has so far.

        Args:
            error: why the engine cannot continue; None: the caller cancelled the request.
        """
        self.error = error
        index = len(self._token_ids)
        self.on_delta(
            RequestDelta(self.request.request_id, index, (), finish_reason=FinishReason.ABORT)
        )

    def take_unread(self) -> list[TextDelta]:
        """Return the text pieces since the last call; call only if ``streams`` is true."""
        unread, self._unread = self._unread, []
        return unread

    def completion(self) -> Completion:
        """Return the whole answer; without a tokenizer, its text is empty."""
        text = "".join(self._pieces)
        if self._text is None and self._tokenizer is not None:
            text = self._tokenizer.decode(self._token_ids)
        return Completion(
            request_id=self.request.request_id,
            text=text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason or FinishReason.ABORT,
            logprobs=tuple(self._logprobs),
            choice_index=self._choice_index,
            prompt_logprobs=tuple(self._prompt_logprobs),
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics | None:
        """Return the times and counts of the request; None if no token was sampled."""
        request = self.request
        if self._first_at is None or request.started_at is None:
            return None
        return RequestMetrics(
            num_output_tokens=len(self._token_ids),
            queue_s=request.started_at - self._began_at,
            ttft_s=self._first_at - self._began_at,
            total_s=self._last_at - self._began_at,
            num_cached_tokens=request.num_hit_tokens,
            num_preemptions=request.num_preemptions,
            num_drafts=request.num_drafts,
            num_accepted_drafts=request.num_accepted_drafts,
            weights=self._weights,
        )
