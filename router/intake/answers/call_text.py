"""CallText: adds the text to one call's tokens, and ends the output at a stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from baton.api.outputs import FinishReason, Receipt, TextDelta
from baton.text.stop_strings import OutputText
from baton.text.tokenizer import Tokenizer
from router.calls.call import Call
from router.intake.answers.divided_text import DividedDelta, DividedText
from router.intake.parsers.base import OutputParser


class CallText:
    """The text of one call's output, as far as its tokens have arrived.

    Args:
        tokenizer: the checkpoint's tokenizer; None: outputs have no text.
        parser: divides the output into parts. Deltas are then `DividedDelta`, and stop strings
            count only in the answer. None: stop strings count in the whole text.
        receipt: returns the call's receipt; called when a stop string ends the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        call: Call,
        parser: OutputParser | None,
        receipt: Callable[[], Receipt],
    ) -> None:
        params, options = call.sampling_params, call.terms.text_options
        self._receipt = receipt
        self._text: OutputText | DividedText | None = None
        if tokenizer is not None:
            self._text = (
                OutputText(tokenizer, params, options)
                if parser is None
                else DividedText(tokenizer, params, options, parser)
            )

    def add(self, output: TextDelta) -> TextDelta:
        """Return the next tokens with their text, cut at a stop string, which ends the output."""
        text, finish_reason, receipt = self._text, output.finish_reason, output.receipt
        token_ids = output.token_ids
        piece = ""
        if text is not None:
            piece = text.push(
                token_ids,
                last=finish_reason is not None,
                ended_by_token=finish_reason is FinishReason.STOP,
            )
        if text is not None and text.stopped:
            finish_reason = FinishReason.STOP
            token_ids = token_ids[: text.num_tokens - output.output_index]
            receipt = dataclasses.replace(
                receipt or self._receipt(), num_output_tokens=text.num_tokens
            )
        made: type[TextDelta] = TextDelta
        parts: dict[str, Any] = {}
        if isinstance(text, DividedText):
            made, parts = DividedDelta, {"parts": tuple(text.parts)}
        return made(
            output.request_id,
            output.output_index,
            token_ids,
            piece,
            finish_reason,
            receipt,
            output.logprobs[: len(token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            stop_string=text.stop_string if text is not None else None,
            pooled=output.pooled,
            **parts,
        )
