"""Stop strings: end an output's text before the first of them, wherever token borders fall.

Torch-free; the router's service and the offline engine share it. Knows no request and no stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.sampling_params import SamplingParams
from baton.tokenizer import Detokenizer, Tokenizer


class StopStrings:
    """Looks for stop strings in a text that comes in pieces.

    Of several, the one that is complete first ends the text; of those complete at the same
    character, the one that began first. So it does not matter how the text is cut into pieces.

    Attributes:
        stopped: whether one was found; what comes after it is nobody's.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        # The end of the text so far that may still become a stop string.
        self._held = ""

    def push(self, text: str) -> str:
        """What of the text can be shown now: up to a stop string, or to what may become one."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What is still held back: the text is at its end."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for start in range(max(len(text) - longest, 0), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stop):
                return len(text) - start
        return 0


class OutputText:
    """Text of a growing output as its reader sees it, with an end before the first stop string.

    Stop strings are looked for in what the token number ``min_tokens`` and those after it add.

    Attributes:
        stopped: whether a stop string was found. The token that completed it is the last one.
        num_tokens: taken so far.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._min_tokens = params.min_tokens
        self._stop_strings = StopStrings(params.stop) if params.stop else None

    @property
    def stopped(self) -> bool:
        return self._stop_strings is not None and self._stop_strings.stopped

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """What ``token_ids`` add to the text that can be shown now.

        With ``last``, what is left is given as it is, unless a stop string ends it.
        """
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
