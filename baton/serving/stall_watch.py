"""StallWatch: ends a call whose client does not read its messages. Knows no service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class StallWatch:
    """Timer that ends a call if its client reads no message for 1 to 1.5 times the timeout.

    The call is ended by cancelling the task that made this object.

    Args:
        address: address of the client, for the log.
        say: sends an error to the client, in case it reads again.

    Attributes:
        is_sending: whether a message waits for the client to read.
        num_sent: number of messages that the client has read.
    """

    def __init__(
        self, address: str, timeout_s: float, say: Callable[[str], Awaitable[None]]
    ) -> None:
        self.is_sending = False
        self.num_sent = 0
        self._address = address
        self._timeout_s = timeout_s
        self._say = say
        self._task = asyncio.current_task()
        self._num_looks = 0
        self._num_seen = -1
        self._last_words: asyncio.Future[None] | None = None
        self._timer = self._look_later()

    def close(self) -> None:
        """Stop the timer, because the call is over."""
        self._timer.cancel()

    def _look_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._timeout_s / 2, self._look)

    def _look(self) -> None:
        if not self.is_sending or self.num_sent != self._num_seen:
            self._num_looks, self._num_seen = 0, self.num_sent if self.is_sending else -1
        else:
            self._num_looks += 1
        self._timer = self._look_later()
        if self._num_looks == 2:
            self._cut_off()

    def _cut_off(self) -> None:
        self.close()
        problem = f"the client took nothing for {self._timeout_s:g} s"
        logger.info("ended a call of %s: %s", self._address, problem)
        assert self._task is not None
        self._last_words = asyncio.ensure_future(self._say(problem))
        self._task.cancel()  # nothing else ends the task's wait for the client
