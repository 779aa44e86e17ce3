"""Answers: adds texts to calls' outputs, and hides other tenants' figures in receipts.

Logs prompts and outputs if enabled. Knows no API.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.api.outputs import Receipt, TextDelta
from baton.text.tokenizer import Tokenizer
from router.calls.call import Call
from router.intake.answers.call_text import CallText
from router.intake.answers.long_answers import LongAnswers
from router.intake.answers.prompt_log import PromptLog
from router.intake.answers.usage import OwnPrompts, told
from router.intake.cache_salts import CacheSalts
from router.intake.parsers.base import OutputParser


class Answers:
    """Makes the answers to the calls of one base model.

    Args:
        tokenizer: the checkpoint's tokenizer; None: outputs have no text.
        salts: decide which cached prompts a request may find, and its receipt may reveal.
        logs_prompts: whether prompts and outputs are logged.

    Attributes:
        salts: see the arguments.
        long: builds the parts of responses that contain many logprobs.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, salts: CacheSalts, *, logs_prompts: bool = False
    ) -> None:
        self.long = LongAnswers()
        self.salts = salts
        self._tokenizer = tokenizer
        self._own_prompts = OwnPrompts(salts)
        self._prompt_log = PromptLog(tokenizer) if logs_prompts else None

    def open_answer(
        self, call: Call, parser: OutputParser | None, receipt: Callable[[], Receipt]
    ) -> Answer:
        """Return the answer to a call that begins now, without tokens yet.

        Logs the prompt if enabled. For ``parser`` and ``receipt``, see `CallText`.
        """
        text = CallText(self._tokenizer, call, parser, receipt)
        return Answer(call, text, self._own_prompts, self._prompt_log)

    def close(self) -> None:
        """End the thread that builds long parts of responses."""
        self.long.close()


class Answer:
    """The answer to one call, as far as its tokens have arrived.

    Args:
        text: adds the text to the call's tokens.
        own_prompts: earlier prompts of the call's tenant, which a receipt may reveal.
        log: log of prompts and outputs; None: nothing is logged.
    """

    def __init__(
        self, call: Call, text: CallText, own_prompts: OwnPrompts, log: PromptLog | None
    ) -> None:
        self._call, self._text, self._own_prompts = call, text, own_prompts
        self._num_own = own_prompts.num_tokens(call)
        self._log = None if log is None else log.log_prompt(call)

    def add(self, output: TextDelta) -> TextDelta:
        """Return the next tokens with their text.

        The receipt of the last tokens is not yet as the client may see it; see `shown`.
        """
        delta = self._text.add(output)
        if delta.output_index == 0:
            self._own_prompts.note(self._call)
        if self._log is not None:
            self._log.note(delta)
        return delta

    def shown(self, receipt: Receipt) -> Receipt:
        """Return a receipt of this call without other tenants' figures, for the client."""
        return told(receipt, self._num_own)
