"""Logprobs with texts in place of token ids, in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from baton.outputs import TokenLogprobs
from baton.tokenizer import Tokenizer
from router.http.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob


class TokenTexts:
    """Texts of tokens; a token that is a part of a character has replacement characters.

    Args:
        tokenizer: None for a checkpoint without one; texts are ``token_id:7`` then.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # the same few are among the best of every token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self.token_bytes(token_id).decode(errors="replace")
        return text

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Logprobs of chat completions."""
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            spelling = self.token_bytes(token_id)
            top = [self._top(other_id, logprob) for other_id, logprob in entry.top]
            text = spelling.decode(errors="replace")
            content.append(TokenLogprob(text, entry.logprob, list(spelling), top))
        return ChatLogprobs(content)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        spelling = self.token_bytes(token_id)
        return TopLogprob(spelling.decode(errors="replace"), logprob, list(spelling))

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """Logprobs of completions.

        Args:
            offset: of the first token in the text, in characters.

        Returns:
            Them, and the offset behind the last token.
        """
        found = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            text = self.text(token_id)
            found.tokens.append(text)
            found.text_offset.append(offset)
            found.token_logprobs.append(entry.logprob if entry else None)
            found.top_logprobs.append(self._by_text(entry) if entry else None)
            offset += len(text)
        return found, offset

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, logprob in entry.top:
            by_text.setdefault(self.text(token_id), logprob)  # of those with one text the best
        return by_text
