"""PromptLog: logs prompts and outputs if the operator enables it; no other log line has them."""

from __future__ import annotations

import logging

from baton.api.outputs import TextDelta
from baton.text.tokenizer import Tokenizer
from router.calls.call import Call

logger = logging.getLogger(__name__)

MAX_CHARS = 2000
_MAX_TOKENS = 2000  # enough tokens to get `MAX_CHARS` characters of text


class PromptLog:
    """Logs one line per prompt and one line per output.

    Args:
        tokenizer: the checkpoint's tokenizer; None: token ids are logged.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def log_prompt(self, call: Call) -> OutputLog:
        """Log a prompt and return the log of its output."""
        token_ids = call.prompt_token_ids[:_MAX_TOKENS]
        text = str(token_ids) if self._tokenizer is None else self._tokenizer.decode(token_ids)
        ids = {"request_id": call.request_id}
        logger.info("prompt", extra={**ids, "text": text[:MAX_CHARS]})
        return OutputLog(ids)


class OutputLog:
    """Collects the pieces of one output, and logs the output when its last piece arrives."""

    def __init__(self, ids: dict[str, str]) -> None:
        self._ids = ids
        self._text = ""
        self._token_ids: list[int] = []

    def note(self, delta: TextDelta) -> None:
        """Add the next piece of the output's text."""
        if len(self._text) < MAX_CHARS:
            self._text += delta.text
        if len(self._token_ids) < _MAX_TOKENS:
            self._token_ids += delta.token_ids
        if delta.finish_reason is not None:
            text = self._text or str(self._token_ids)
            logger.info("output", extra={**self._ids, "text": text[:MAX_CHARS]})
