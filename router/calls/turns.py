"""Turns: limit how many calls continue in one round of the event loop.

An event loop runs all tasks that were woken together before it looks at sockets and timers again.
Checking or placing a call takes up to a millisecond. A thousand calls that arrive at once, or that
a lost node leaves behind, would block tokens and beats for a second.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURNS_AT_ONCE = 16


class Turns:
    """Hand out a limited number of turns per round of the event loop, first come first served.

    Args:
        at_once: turns per round.
    """

    def __init__(self, at_once: int = TURNS_AT_ONCE) -> None:
        self._at_once = self._num_left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False  # a call of `_begin_round` is scheduled

    async def wait_for_turn(self) -> None:
        """Return at once if a turn is left in this round, else wait for a later round."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_round)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin_round(self) -> None:
        self._num_left = self._at_once
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise its call was cancelled
                turn.set_result(None)
                self._num_left -= 1
        self._is_counting = self._num_left < self._at_once
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_round)
