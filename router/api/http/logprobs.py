"""Logprobs in both of OpenAI's forms, in which tokens are shown by their texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from baton.api.outputs import TokenLogprobs
from baton.text.token_pieces import OutputPieces
from baton.text.tokenizer import Tokenizer
from router.api.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)


class TokenTexts:
    """Looks up the texts of tokens; incomplete characters become replacement characters.

    Args:
        tokenizer: the checkpoint's tokenizer; None: the checkpoint has no tokenizer, and the text
            of token 7 is ``token_id:7``.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # Texts that were looked up for this answer: tokens repeat many times.
        self._texts: dict[int, str] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special: texts show it only if the request asks for it."""
        return self._tokenizer is None or token_id in self._tokenizer.special_token_ids

    @property
    def pieces(self) -> OutputPieces | None:
        """The bytes that each token adds to a text; None if there is no tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.pieces(self._tokenizer.special_token_ids)

    def text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode(errors="replace")
        return text

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return logprobs in the form of chat completions."""
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
        logprobs: Iterable[TokenLogprobs | None],
        offsets: TextOffsets,
    ) -> CompletionLogprobs:
        """Return logprobs in the form of completions.

        Args:
            offsets: knows the text before these tokens, and tells where each token begins.
        """
        found = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            found.tokens.append(self.text(token_id))
            found.text_offset.append(offsets.next_offset(token_id))
            found.token_logprobs.append(entry.logprob if entry else None)
            found.top_logprobs.append(self._by_text(entry) if entry else None)
        return found

    def prompt(
        self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None]
    ) -> list[dict[str, PromptLogprob] | None]:
        """Return a prompt's logprobs in vLLM's form.

        Each prompt token has a dictionary by token id; the prompt's own token comes first.
        """
        found: list[dict[str, PromptLogprob] | None] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            if entry is None:
                found.append(None)
                continue
            by_id = {str(token_id): PromptLogprob(entry.logprob, None, self.text(token_id))}
            for rank, (other_id, logprob) in enumerate(entry.top, 1):
                by_id[str(other_id)] = PromptLogprob(logprob, rank, self.text(other_id))
            found.append(by_id)
        return found

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, logprob in entry.top:
            # If several tokens have the same text, keep the most probable one, which comes first.
            by_text.setdefault(self.text(token_id), logprob)
        return by_text


class TextOffsets:
    """Computes where tokens begin in a growing text, in characters.

    token    "a " | E2 | 82 | AC | <special> | "b"
    text     "a "   €                          "b"
    offset   0      2    2    2    3           3

    A token that continues a character begins where that character begins; a token without text
    begins where the text before the token ends.

    Args:
        start: number of characters before the first token.
        shows_special: whether the text contains special tokens; ignored if ``text`` is given.
        text: the whole text, to look up which special tokens it contains; empty: unknown.
    """

    def __init__(
        self, texts: TokenTexts, start: int = 0, *, shows_special: bool = False, text: str = ""
    ) -> None:
        self._texts = texts
        self._pieces = pieces = texts.pieces
        self._num_chars = start
        self._shows_special = shows_special
        self._text = text
        self._has_begun = False
        self._num_to_strip = pieces.num_stripped if pieces is not None else 0
        # Invalid bytes become as many characters as in the detokenizer's text, which depends on
        # whether the vocabulary has tokens for single bytes.
        has_byte_tokens = pieces is not None and pieces.has_byte_tokens
        errors = "surrogateescape" if has_byte_tokens else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        # Whether the text before the next token ends with a complete character
        self._is_between = True
        # Number of characters, by token id, of tokens that consist of complete characters.
        self._num_chars_of: dict[int, int] = {}

    def next_offset(self, token_id: int) -> int:
        """Return where the next token begins, in characters, and add the token to the text."""
        begins_at = self._num_chars
        if self._is_between and self._has_begun and not self._num_to_strip:
            num_chars = self._num_chars_of.get(token_id)
            if num_chars is not None:
                self._num_chars += num_chars
                return begins_at
            begins_at = self._take(token_id)
            if self._is_between and not self._texts.is_special(token_id):
                self._num_chars_of[token_id] = self._num_chars - begins_at
            return begins_at
        return self._take(token_id)

    def _take(self, token_id: int) -> int:
        shown = self._shown_bytes(token_id)
        if not shown:
            return self._num_chars
        num_held = len(self._decoder.getstate()[0])
        first = self._decoder.decode(shown[:1])
        num_own = 0 if self._decoder.getstate()[0] else 1
        goes_on = 0x80 <= shown[0] < 0xC0 and len(first) < 2
        # The first bytes of a character that is never completed become replacement characters,
        # which come before this token.
        num_broken = len(first) - num_own if num_held and not goes_on else 0
        begins_at = self._num_chars + num_broken
        text = first + self._decoder.decode(shown[1:])
        self._num_chars += len(text) - self._num_stripped(text)
        self._is_between = not self._decoder.getstate()[0]
        return begins_at

    def _shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; a hidden special token adds none."""
        if self._texts.is_special(token_id):
            spelling = self._texts.text(token_id)
            is_shown = self._shows_special
            if self._text:
                is_shown = self._text.startswith(spelling, self._num_chars)
            self._has_begun |= is_shown
            return spelling.encode() if is_shown else b""
        if self._pieces is None:
            return self._texts.token_bytes(token_id)
        if self._has_begun:
            return self._pieces.later((token_id,))
        first = self._pieces.first(token_id)
        self._has_begun = first is not None
        return first or b""

    def _num_stripped(self, text: str) -> int:
        """Return how many leading characters of ``text`` the detokenizer strips."""
        number = 0
        while self._num_to_strip and number < len(text):
            if self._pieces is None or text[number] != self._pieces.stripped:
                self._num_to_strip = 0
                break
            number += 1
            self._num_to_strip -= 1
        return number


def as_many(
    logprobs: Sequence[TokenLogprobs | None], num_tokens: int
) -> Sequence[TokenLogprobs | None]:
    """Return the logprobs; return one None per token if a node sent no logprobs."""
    return logprobs if len(logprobs) == num_tokens else [None] * num_tokens


def with_top(
    logprobs: Sequence[TokenLogprobs | None], num_top: int
) -> Iterable[TokenLogprobs | None]:
    """Yield each token's logprobs with at most ``num_top`` top tokens."""
    for entry in logprobs:
        if entry is None or len(entry.top) <= num_top:
            yield entry
        else:
            yield TokenLogprobs(entry.logprob, entry.top[:num_top])


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Join the logprobs of consecutive tokens into one list per field."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
