"""Answers: the texts of calls' outputs, and receipts without other tenants' figures, for clients.

Logs outputs if enabled. Knows no API: `LongAnswers` builds the parts of any API's response.
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
    """Make the answers to one router's calls.

    Args:
        tokenizer: the checkpoint's tokenizer; None: outputs have no text.
        salts: decide which cached prompts a request may find, and its receipt may reveal.
        logs_prompts: whether prompts and outputs are logged.

    Attributes:
        salts: see the arguments.
        long: builds response parts that contain many logprobs.
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
        """Return the answer to a call that begins. See `CallText` for ``parser`` and ``receipt``.

        Logs the prompt if enabled.
        """
        text = CallText(self._tokenizer, call, parser, receipt)
        return Answer(call, text, self._own_prompts, self._prompt_log)

    def close(self) -> None:
        """End the thread of long answers."""
        self.long.close()


class Answer:
    """One call's answer so far.

    Args:
        text: adds the text to the call's tokens.
        own_prompts: earlier prompts of the call's tenant, which a receipt may reveal.
        log: log of the output; None: prompt and output are not logged.
    """

    def __init__(
        self, call: Call, text: CallText, own_prompts: OwnPrompts, log: PromptLog | None
    ) -> None:
        self._call, self._text, self._own_prompts = call, text, own_prompts
        self._num_own = own_prompts.num_tokens(call)
        self._log = None if log is None else log.log_prompt(call)

    def add(self, output: TextDelta) -> TextDelta:
        """Return an output with its text; the receipt of the last output must not be shown yet."""
        delta = self._text.add(output)
        if delta.output_index == 0:
            self._own_prompts.note(self._call)
        if self._log is not None:
            self._log.note(delta)
        return delta

    def shown(self, receipt: Receipt) -> Receipt:
        """Return a receipt of this call as its client may see it."""
        return told(receipt, self._num_own)
