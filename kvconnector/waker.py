"""Waker: lets the KV I/O thread sleep until a message comes, the node has a wish, or time is up.

Refuses to know: transports, what the thread does after it wakes up.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import Protocol


class Waker(Protocol):
    """A flag that wakes one waiting thread: a `threading.Event` or a `DescriptorWaker`."""

    def set(self) -> None:
        """Set the flag. It ends the present wait, or the next wait without delay; thread-safe."""

    def clear(self) -> None:
        """Reset the flag."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait until the flag is set, at most ``timeout`` seconds."""


class DescriptorWaker:
    """A waker whose waits also end when a descriptor becomes readable.

    Waits last whole milliseconds. If a descriptor ends many long waits, the waker stops watching
    the descriptor for `IGNORE_S`, because the descriptor may be readable all the time.

    Args:
        descriptor: the descriptor, for example of an epoll instance; the waker does not close it.

    Attributes:
        listens: whether the waker watches the descriptor now.
    """

    MAX_WAKES_PER_S = 2000
    IGNORE_S = 10.0
    LONG_S = 0.05  # shorter waits are for bytes in flight, which may arrive often

    def __init__(self, descriptor: int) -> None:
        self._flag = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._flag, select.POLLIN)
        self._poller.register(descriptor, select.POLLIN)
        self._flag_poller = select.poll()
        self._flag_poller.register(self._flag, select.POLLIN)
        self._descriptor = descriptor
        self.listens = True
        self._count, self._counted_from = 0, time.monotonic()
        self._ignored_at = 0.0

    def set(self) -> None:
        os.eventfd_write(self._flag, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the flag is not set
            os.eventfd_read(self._flag)

    def wait(self, timeout: float | None = None) -> object:
        timeout_s = 1.0 if timeout is None else timeout
        if not self.listens and time.monotonic() - self._ignored_at >= self.IGNORE_S:
            self._poller.register(self._descriptor, select.POLLIN)
            self.listens = True
        found = self._poller.poll(1e3 * timeout_s)
        if timeout_s >= self.LONG_S and any(one == self._descriptor for one, _ in found):
            self._count_wake()
        return found

    def wait_for_flag(self, timeout: float) -> object:
        """Wait until the flag is set, whatever the descriptor does, at most ``timeout`` seconds."""
        return self._flag_poller.poll(1e3 * timeout)

    def _count_wake(self) -> None:
        self._count += 1
        now = time.monotonic()
        if now - self._counted_from >= 1.0:
            self._count, self._counted_from = 1, now
        elif self._count > self.MAX_WAKES_PER_S:
            self._poller.unregister(self._descriptor)
            self.listens, self._ignored_at = False, now
            self._count = 0

    def __del__(self) -> None:
        os.close(self._flag)  # not earlier, because other threads may still set the flag


def make_waker(descriptor: int | None) -> Waker:
    """Make a waker; it also waits for ``descriptor`` if there is one and the system has eventfd."""
    if descriptor is None or not hasattr(os, "eventfd"):
        return threading.Event()
    return DescriptorWaker(descriptor)
