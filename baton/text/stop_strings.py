"""Stop strings: ends an output's text at the first stop string, which may span several tokens.

Needs no torch, so that the router can use this module, too. Knows no request and no stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.sampling_params import SamplingParams
from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeOptions:
    """Options for turning tokens into the text that a client sees.

    Attributes:
        skip_special_tokens: whether the text leaves out special tokens. If not, the text shows all
            special tokens except the token that ended the output.
        include_stop: whether the text includes the stop string or stop token that ended it.
        shown_token_ids: special tokens that are always shown.
    """

    skip_special_tokens: bool = True
    include_stop: bool = False
    shown_token_ids: frozenset[int] = frozenset()


DEFAULT_TEXT = DetokenizeOptions()


class StopStrings:
    """Search for several stop strings in a text that comes in pieces, in linear time.

    The stop string that is complete first ends the text; if several end at the same character, the
    stop string that began first ends the text. So the result does not depend on how the text is
    divided into pieces.

    Args:
        include: whether the text includes the stop string.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self.found: str | None = None
        self._include = include
        self._searches = [_Search(text) for text in stop]
        # The end of the text so far, held back because it may begin a stop string.
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found; if so, later text is dropped."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Add a piece of text; return the text that may be shown now.

        Holds back the end of the text if it may begin a stop string.
        """
        if self.stopped:
            return ""
        num_before = len(self._held)
        found = [
            (end, end - len(search.stop), search.stop)
            for search in self._searches
            if (end := search.push(text)) is not None
        ]
        text = self._held + text
        if found:
            self._held = ""
            end, begin, self.found = min(found)
            return text[: num_before + (end if self._include else begin)]
        num_held = max((search.num_matched for search in self._searches), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Search for one string in a text that comes in pieces (Knuth, Morris and Pratt, 1977).

    Attributes:
        num_matched: length of the longest suffix of the text that begins the string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def push(self, text: str) -> int | None:
        """Add a piece of text; return where in it the string's first occurrence ends, or None."""
        stop, matched, position = self.stop, self.num_matched, 0
        while position < len(text):
            if not matched:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            character = text[position]
            while matched and stop[matched] != character:
                matched = self._borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            position += 1
            if matched == len(stop):
                return position
        self.num_matched = matched
        return None


@functools.lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper suffix that begins the text."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return tuple(borders)


class OutputText:
    """The text of a growing output, which the first stop string ends.

    Stop strings are ignored in the first ``min_tokens`` tokens.

    Attributes:
        stopped: whether the tokens so far contain a stop string.
        stop_string: the stop string that was found, or None.
        num_tokens: number of tokens pushed so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        options: DetokenizeOptions = DEFAULT_TEXT,
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            shown_token_ids=options.shown_token_ids,
        )
        self._min_tokens = params.min_tokens
        self._stop_strings = (
            StopStrings(params.stop, include=options.include_stop) if params.stop else None
        )
        self._hides_end = not (options.skip_special_tokens or options.include_stop)
        self._special_token_ids = tokenizer.special_token_ids

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        return self._stop_strings.found if self._stop_strings is not None else None

    def push(
        self, token_ids: Sequence[int], *, last: bool = False, ended_by_token: bool = False
    ) -> str:
        """Add tokens; return the text that may be shown now.

        Args:
            last: whether the output ends; then text that was held back is returned too, unless a
                stop string has ended the text.
            ended_by_token: whether the output ended because its last token is an end token.
        """
        if ended_by_token and self._hides_end and token_ids:
            token_ids = token_ids[: -1 if token_ids[-1] in self._special_token_ids else None]
        if self._stop_strings is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids, last=last)
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._look(self._detokenizer.push([token_id])))
        if last and not self.stopped:
            pieces.append(self._look(self._detokenizer.push([], last=True)))
            pieces.append(self._stop_strings.flush())
        return "".join(pieces)

    def _look(self, text: str) -> str:
        assert self._stop_strings is not None
        return self._stop_strings.push(text) if self.num_tokens >= self._min_tokens else text
