"""Finds an earlier occurrence of a text's last tokens, on the host, in C if possible.

The tokens that follow the earlier occurrence can be used as drafts. Refuses to know: requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton_kernels.dispatch import native_ops


def find_run(tokens: NDArray[np.int32], least: int, most: int) -> int:
    """Find an earlier copy of the longest run of tokens that a text ends with.

    Args:
        tokens: `[num_tokens]`.
        least, most: minimum and maximum length of the run, in tokens.

    Returns:
        The position after the latest earlier copy of the run; -1: there is no earlier copy.
    """
    num = len(tokens)
    if num < 2:
        return -1
    ends = np.flatnonzero(tokens[: num - 1] == tokens[num - 1]) + 1
    length = 1
    while length < most:
        longer = ends[ends > length]
        longer = longer[tokens[longer - 1 - length] == tokens[num - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) if len(ends) and length >= least else -1


class Text:
    """A growing text of tokens, in which earlier occurrences of its last tokens can be found."""

    def __init__(self) -> None:
        ops = native_ops()
        self._find_run = None if ops is None else ops.find_run
        self._tokens = np.empty(0, np.int32)
        self._address = 0
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        num_tokens = self.num_tokens + len(token_ids)
        if num_tokens > len(self._tokens):
            grown = np.empty(2 * num_tokens, np.int32)
            grown[: self.num_tokens] = self._tokens[: self.num_tokens]
            self._tokens, self._address = grown, grown.ctypes.data
        self._tokens[self.num_tokens : num_tokens] = token_ids
        self.num_tokens = num_tokens

    def continuation(self, num_tokens: int, least: int, most: int) -> tuple[int, ...]:
        """Return the tokens after the earlier copy of the text's last tokens; empty: no copy.

        If fewer than ``num_tokens`` tokens follow the copy, the result repeats these tokens,
        because such a text probably continues to repeat.

        Args:
            num_tokens: number of tokens to return.
            least, most: minimum and maximum length of the run to look for, in tokens.
        """
        num = self.num_tokens
        if self._find_run is None:
            place = find_run(self._tokens[:num], least, most)
        else:
            place = self._find_run(self._address, num, least, most)
        if place < 0:
            return ()
        found: list[int] = self._tokens[place : min(place + num_tokens, num)].tolist()
        while len(found) < num_tokens:
            found += found[: num_tokens - len(found)]
        return tuple(found)
