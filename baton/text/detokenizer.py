"""Detokenizer: makes the text of a growing output, piece by piece.

All pieces joined are the text of the whole output. In most vocabularies, the bytes that a token
adds do not depend on other tokens: these bytes are joined and decoded as UTF-8. For other
vocabularies, the tokenizers library decodes recent tokens again with each new token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from baton.text.token_pieces import OutputPieces

# Tokens that may wait for the rest of a character: a character has at most 4 bytes, so 8 tokens
# without text are not its beginning.
_HELD_PER_SKIPPED = 8
_LONG_PIECE_TOKENS = 64
_CONTEXT_TOKENS = 16
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Code points that stand for invalid bytes in Python's texts (surrogateescape).
_LONE_BYTE = re.compile("[\udc80-\udcff]")


class Decodes(Protocol):
    """The part of a tokenizer that a `Detokenizer` needs.

    Attributes:
        special_token_ids: ids of special tokens, which have no text by default.
    """

    special_token_ids: frozenset[int]

    def pieces(self, skipped: frozenset[int]) -> OutputPieces | None:
        """Return the bytes that each token adds; None if other tokens change these bytes."""
        ...

    def decode_at_once(self, token_ids: Sequence[int], skipped: frozenset[int]) -> str:
        """Decode tokens with the library, without those in ``skipped``."""
        ...


class Detokenizer:
    """The text of one growing output; no piece ends inside a character.

    Args:
        skip_special_tokens: whether special tokens have no text.
        shown_token_ids: ids of special tokens that have a text even if ``skip_special_tokens`` is
            set.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        if shown_token_ids:
            skipped -= shown_token_ids
        pieces = tokenizer.pieces(skipped)
        self._text = _Window(tokenizer, skipped) if pieces is None else _JoinedPieces(pieces)

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that new tokens add, up to the last complete character.

        Args:
            last: whether the output ends, so that the bytes of an incomplete character are returned
                too.
        """
        return self._text.push(token_ids, last=last)


class _JoinedPieces:
    """Detokenizer that joins the bytes of tokens.

    Invalid bytes become replacement characters as in the library's decoder: one for each byte (if
    the vocabulary has byte tokens), or one for each broken character.
    """

    def __init__(self, pieces: OutputPieces) -> None:
        self._pieces = pieces
        self._has_begun = False
        self._replaced = [_ReplacedText(old, new) for old, new in pieces.replaced]
        self._num_to_strip = pieces.num_stripped
        self._held: list[str] = []  # pieces held back until the output ends
        errors = "surrogateescape" if pieces.has_byte_tokens else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, token_ids: Sequence[int], *, last: bool) -> str:
        first = b"" if self._has_begun else self._begin(token_ids := list(token_ids))
        text = self._decoder.decode(first + self._pieces.later(token_ids), last)
        if self._pieces.has_byte_tokens and not text.isascii():
            text = _LONE_BYTE.sub(_REPLACEMENT, text)
        if self._pieces.rewrite is not None:
            self._held.append(text)
            return self._pieces.rewrite("".join(self._held)) if last else ""
        for replaced in self._replaced:
            text = replaced.push(text, last=last)
        return self._strip(text) if self._num_to_strip and text else text

    def _begin(self, token_ids: list[int]) -> bytes:
        """Return the bytes of the first token with text; remove tokens up to it from the list."""
        for index, token_id in enumerate(token_ids):
            if (first := self._pieces.first(token_id)) is not None:
                self._has_begun = True
                del token_ids[: index + 1]
                return first
        token_ids.clear()
        return b""

    def _strip(self, text: str) -> str:
        """Remove the characters that the library's decoder strips from an output's beginning."""
        start = 0
        while start < len(text) and self._num_to_strip:
            if text[start] != self._pieces.stripped:
                self._num_to_strip = 0
                break
            start += 1
            self._num_to_strip -= 1
        return text[start:]


class _ReplacedText:
    """Replaces a string in a text that comes in pieces; holds back what may begin the string."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, text: str, *, last: bool) -> str:
        *before, rest = (self._held + text).split(self._old)
        num_held = 0 if last else self._num_begun(rest)
        self._held = rest[len(rest) - num_held :]
        return self._new.join([*before, rest[: len(rest) - num_held]])

    def _num_begun(self, text: str) -> int:
        """Return the length of the longest suffix of the text that may begin the string."""
        lengths = range(min(len(text), len(self._old) - 1), 0, -1)
        return next((length for length in lengths if self._old.startswith(text[-length:])), 0)


class _Window:
    """Detokenizer that decodes a window of recent tokens again with each new token.

    token ids   [ ...... | shown before | new ]
                         ^ _start       ^ _shown

    While an output's bytes form no characters, the window grows, and is decoded ever less often, so
    that the total work stays a small multiple of the output's length.
    """

    def __init__(self, tokenizer: Decodes, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        # First id to decode. Some earlier ids are decoded again, because a token's text may depend
        # on the token before it.
        self._start = 0
        self._shown = 0
        self._look_at = 0  # decode again once there are this many ids

    def push(self, token_ids: Sequence[int], *, last: bool) -> str:
        # Tokens are added one at a time, so that the text does not depend on their grouping.
        texts = [self._push_one(token_id) for token_id in token_ids]
        return "".join([*texts, self._look(last=True)] if last else texts)

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._look() if len(self._ids) >= self._look_at else ""

    def _look(self, *, last: bool = False) -> str:
        before = self._decode(self._start, self._shown)
        now = self._decode(self._start, len(self._ids))
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not last):
            num_held = len(self._ids) - self._shown
            self._look_at = len(self._ids) + 1 + num_held // _HELD_PER_SKIPPED
            return ""
        self._start = self._shown
        if len(self._ids) - self._start > _LONG_PIECE_TOKENS:
            self._shorten_context(now)
        self._shown = len(self._ids)
        return now[len(before) :]

    def _shorten_context(self, now: str) -> None:
        """Drop old tokens from the window if the new text does not depend on them."""
        start = len(self._ids) - _CONTEXT_TOKENS
        if now.endswith(self._decode(start, len(self._ids))):
            self._start = start

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode_at_once(self._ids[start:end], self._skipped)
