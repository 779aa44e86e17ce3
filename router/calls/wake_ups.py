"""WakeUps and Turns: limit how many readers and calls run in one round of the event loop.

An event loop runs all woken tasks in one round, before it looks at sockets and timers again.

Sending a message with one token to a client costs nearly as much CPU time as a message with many
tokens. If each token were sent at once, a router at the limit of its CPU would also be slow to read
the links of its nodes, and tokens would pile up in the links. `WakeUps` therefore wakes the readers
of outputs in waves, no more often than the router can serve them.

Checking or placing a call takes up to a millisecond. A thousand calls that arrive together, or that
lose their node together, would hold up tokens and beats for a second. `Turns` therefore limits how
many calls run in one round.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from router.calls.wait_clock import WaitClock

BUSY_SHARE = 0.6
LONGEST_REST_S = 0.05
LONGEST_WAIT_S = 0.1  # longest delay of a wave because other processes have the CPU
WOKEN_AT_ONCE = 256  # maximum number of readers woken in one round of the event loop
TURNS_AT_ONCE = 16


class WakeUps:
    """Wakes readers in waves; each event loop has one instance.

    A wave begins as soon as the process was busy for less than `BUSY_SHARE` of the time since the
    last wave began, at the latest `LONGEST_REST_S` after the last wave. Time for which the event
    loop waits for a CPU counts as busy, and not as rest. So a busy router with half a core merges
    tokens into waves as a busy router with a whole core does.

    Args:
        clock: returns seconds.
        cpu_clock: returns the CPU seconds that the process has used.
        wait_clock: returns the seconds for which the event loop waited for a CPU; None: a
            `WaitClock`.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
        wait_clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._wait_clock = wait_clock or WaitClock()
        self._waiters: list[asyncio.Future[None]] = []
        self._began = self._cpu_began = self._wait_began = 0.0

    def add_waiter(self, waiter: asyncio.Future[None]) -> None:
        """Wake this reader, by setting its future, with the next wave."""
        self._waiters.append(waiter)
        # `_look` runs later, so that all tokens of one message from a node join the same wave
        if len(self._waiters) == 1:
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Begin a wave if the process was idle enough since the last one, else check later."""
        waited_s = self._wait_clock() - self._wait_began
        busy_s = self._cpu_clock() - self._cpu_began + waited_s
        longest_s = LONGEST_REST_S + min(waited_s, LONGEST_WAIT_S)
        rest_s = self._began + min(busy_s / BUSY_SHARE, longest_s) - self._clock()
        if rest_s > 0:
            asyncio.get_running_loop().call_later(rest_s, self._look)
            return
        self._began, self._cpu_began = self._clock(), self._cpu_clock()
        self._wait_began = self._wait_clock()
        waiters, self._waiters = self._waiters, []
        self._wake(iter(waiters))

    def _wake(self, waiters: Iterator[asyncio.Future[None]]) -> None:
        """Wake a wave's readers, at most `WOKEN_AT_ONCE` in each round of the event loop."""
        some = list(itertools.islice(waiters, WOKEN_AT_ONCE))
        for waiter in some:
            if not waiter.done():
                waiter.set_result(None)
        if len(some) == WOKEN_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake, waiters)


class Turns:
    """Lets a limited number of calls run per round of the event loop, in order of arrival.

    Args:
        at_once: number of turns per round.
    """

    def __init__(self, at_once: int = TURNS_AT_ONCE) -> None:
        self._at_once = self._num_left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False  # whether a call of `_begin_round` is scheduled

    async def wait_for_turn(self) -> None:
        """Return at once if this round has a turn left, else wait for a later round."""
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
            if not turn.done():  # a call that was cancelled needs no turn
                turn.set_result(None)
                self._num_left -= 1
        self._is_counting = self._num_left < self._at_once
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_round)
