"""Logprobs with texts in place of token ids, in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
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

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def shown_bytes(self, token_id: int, *, is_first: bool) -> bytes:
        """What a token adds to a text; special tokens add nothing.

        Args:
            is_first: whether the text begins with it; some tokenizers leave out a blank there.
        """
        if self._tokenizer is None or token_id in self._tokenizer.special_token_ids:
            return b""
        spelling = self._tokenizer.token_bytes(token_id)
        if is_first and spelling[:1] == b" ":
            return spelling[not self._tokenizer.decode([token_id]).startswith(" ") :]
        return spelling

    def text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

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
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: TextOffsets,
    ) -> CompletionLogprobs:
        """Logprobs of completions.

        Args:
            offsets: of the text that the tokens belong to, up to them.
        """
        found = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            found.tokens.append(self.text(token_id))
            found.text_offset.append(offsets.take(token_id))
            found.token_logprobs.append(entry.logprob if entry else None)
            found.top_logprobs.append(self._by_text(entry) if entry else None)
        return found

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, logprob in entry.top:
            by_text.setdefault(self.text(token_id), logprob)  # of those with one text the best
        return by_text


class TextOffsets:
    """Where in a growing text its tokens begin, in characters.

    token    "a " | E2 | 82 | AC | <special> | "b"
    text     "a "   €                          "b"
    offset   0      2    2    2    3           3

    A token that goes on with a character begins where the character does, one without text where
    the text goes on.

    Args:
        start: where the first token begins.
    """

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        self._texts = texts
        self._num_chars = start
        self._is_first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, token_id: int) -> int:
        """Where the next token begins."""
        shown = self._texts.shown_bytes(token_id, is_first=self._is_first)
        if not shown:
            return self._num_chars
        self._is_first = False
        begins_at = self._num_chars
        num_held = len(self._decoder.getstate()[0])
        first = self._decoder.decode(shown[:1])
        goes_on = 0x80 <= shown[0] < 0xC0 and len(first) < 2
        if num_held and not goes_on:  # what was held is no character, and shown as one of its own
            begins_at += 1
        self._num_chars += len(first) + len(self._decoder.decode(shown[1:]))
        return begins_at


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Logprobs of tokens that follow each other."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
