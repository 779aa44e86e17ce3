"""AdapterQueue: commands that wait on a node until their adapters are in memory.

    command -> adapter in memory? -> start
                 `-- no -> read and pack it on another thread -> wait for a slot -> load -> start

Adapters are loaded in the order in which they were first requested. No adapter waits for ever: once
one has waited long for a slot, commands of other adapters wait behind its commands, unless their
adapter is pinned. Used on the engine's thread. Refuses to know: how commands are computed,
names of adapters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from baton.adapters.digest import (
    AdapterDigest,
    AdapterError,
    AdapterMissingError,
    shorten_digest,
)
from baton.adapters.sources import find_named
from baton.api.errors import OverloadedError, is_out_of_memory
from baton.link.words import AbortAll, DecodeCommand, PrefillCommand
from engine.adapters import ReadAdapter
from engine.engine import Engine

logger = logging.getLogger(__name__)

# Seconds that a command waits for its adapter before it fails, because another node may be quicker.
LOAD_TIMEOUT_S = 45.0
# Once an adapter has waited this many seconds for a slot, commands of other adapters may no longer
# overtake it.
PATIENCE_S = 1.0
# Niceness of a thread that reads with low priority: on a core that steps use all the time, the
# thread gets a sixteenth of the time.
NICENESS = 12
_FADING = 0.5  # weight of a new value in the moving average

JobCommand = PrefillCommand | DecodeCommand


@dataclass(frozen=True, slots=True)
class Failure:
    """A command that cannot start on this node.

    Attributes:
        is_late: whether the command's deadline has passed.
    """

    command: JobCommand
    problem: str
    is_late: bool = False


@dataclass(slots=True)
class _Load:
    """An adapter that is being read into memory.

    Attributes:
        reading: future of the read adapter and the seconds that reading took; None: reading has not
            begun, or is not needed.
        read_at: when the engine's thread found that reading was done; None before.
        problem: why the adapter has no slot yet; empty: no problem so far.
        commands: waiting commands, each with the time of its arrival.
    """

    reading: Future[tuple[ReadAdapter, float]] | None = None
    read_at: float | None = None
    problem: str = "its files are being read"
    commands: list[tuple[float, JobCommand]] = field(default_factory=list)


class AdapterQueue:
    """Holds commands until their adapters are in memory.

    Args:
        engine: computes with the adapters.
        root: folder below which the folders of adapters must lie; None: adapters in folders are
            refused.
        wake: wakes the engine's thread; safe from any thread.
        clock: returns seconds, never going back.
        gives_way: whether steps take precedence over reading adapters if both need the same core.

    Attributes:
        load_s: moving average of the seconds that reading and loading an adapter took; 0: unknown.
    """

    def __init__(
        self,
        engine: Engine,
        root: Path | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        gives_way: bool = False,
    ) -> None:
        self.load_s = 0.0
        self._table, self._root, self._wake, self._clock = engine.adapters, root, wake, clock
        self._gives_way = gives_way
        self._loads: OrderedDict[AdapterDigest, _Load] = OrderedDict()  # oldest adapter first

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting commands; safe from any thread."""
        return sum(len(load.commands) for load in list(self._loads.values()))

    def admit(self, command: JobCommand, received_at: float) -> bool:
        """Return whether a command may start now; otherwise, the command waits here.

        Raises AdapterMissingError if the command's adapter is not in memory and cannot be loaded.
        """
        digest = command.adapter
        if not digest:
            return True
        if self._loads:
            self.cancel(command.request_id)
        load = self._loads.get(digest)
        if load is None:
            is_here = self._table.takes_requests(digest)
            if is_here and (self._table.is_pinned(digest) or not self._must_queue()):
                return True
            if not (is_here or self._table.has_read(digest)):
                self._check_source(digest, command.adapter_source)
            load = self._loads[digest] = _Load()
        load.commands.append((received_at, command))
        return False

    def take_ready(self) -> Iterator[tuple[float, JobCommand] | Failure]:
        """Load adapters that can be loaded now; yield failures, and commands to start.

        Each command comes with the time of its arrival. The caller must start a command before it
        asks for the next one: otherwise, another adapter could take the slot of the command's
        adapter.
        """
        if not self._loads:
            return
        yield from self._expire()
        for digest, load in list(self._loads.items()):
            if not load.commands:  # all commands were cancelled
                del self._loads[digest]
                continue
            try:
                is_here = self._bring_in(digest, load)
            except OverloadedError as error:
                load.problem = str(error)
                return  # later adapters must not take the slot that this one awaits
            except (AdapterError, AdapterMissingError) as error:
                del self._loads[digest]
                logger.warning("cannot load adapter %s: %s", shorten_digest(digest), error)
                yield from (Failure(command, str(error)) for _, command in load.commands)
                continue
            if is_here:
                del self._loads[digest]
                yield from load.commands

    def cancel(self, request_id: str, epoch: int | None = None) -> None:
        """Remove a waiting command from the queue.

        Args:
            epoch: the attempt whose command is removed; None: any attempt.
        """
        for load in self._loads.values():
            load.commands = [
                (received_at, one)
                for received_at, one in load.commands
                if one.request_id != request_id or epoch not in (None, one.epoch)
            ]

    def abort(self, abort: AbortAll) -> None:
        """Remove from the queue the waiting commands that an abort concerns."""
        for load in self._loads.values():
            load.commands = [
                item for item in load.commands if not abort.concerns(item[1].request_id)
            ]

    # ------------------------------------------------------------------ inside

    def _must_queue(self) -> bool:
        """Return whether the oldest adapter has waited longer than `PATIENCE_S` for a slot."""
        oldest = next(iter(self._loads.values()), None)
        waits_since = None if oldest is None else oldest.read_at
        return waits_since is not None and self._clock() - waits_since > PATIENCE_S

    def _is_reading(self) -> bool:
        return any(one.reading and not one.reading.done() for one in self._loads.values())

    def _check_source(self, digest: AdapterDigest, source: str) -> None:
        """Raise AdapterMissingError if an adapter's files cannot be read here."""
        if not self._table.has_slots or not source:
            is_able = self._table.has_slots
            why = "its folder is not known" if is_able else "this node loads no adapters"
            raise AdapterMissingError(
                f"adapter: {shorten_digest(digest)} is not loaded here, and {why}"
            )

    def _begin_reading(
        self, digest: AdapterDigest, source: str
    ) -> Future[tuple[ReadAdapter, float]]:
        """Read and pack an adapter on a thread of its own, because the disk may hang."""
        self._check_source(digest, source)
        reading: Future[tuple[ReadAdapter, float]] = Future()

        def read() -> None:
            if self._gives_way:
                _be_nice()
            try:
                reading.set_result(self._read(digest, source))
            except BaseException as error:  # `_bring_in` raises this error
                reading.set_exception(error)
            self._wake()

        try:
            threading.Thread(target=read, name="read-adapter", daemon=True).start()
        except RuntimeError as error:
            raise AdapterMissingError(f"adapter: cannot be read: {error}") from error
        return reading

    def _read(self, digest: AdapterDigest, source: str) -> tuple[ReadAdapter, float]:
        """Read and pack an adapter, on the reading thread; raises AdapterError."""
        began_at = self._clock()
        try:
            adapter = self._table.read(find_named(self._root, source), digest)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise AdapterError(f"{source!r:.200}: does not fit in this machine's memory") from None
        return adapter, self._clock() - began_at

    def _bring_in(self, digest: AdapterDigest, load: _Load) -> bool:
        """Load an adapter if its files are read; return whether it is in memory.

        Raises:
            AdapterError: the adapter's files are malformed, or it does not fit the model.
            AdapterMissingError: no source of the files is known, or pinned adapters have all slots.
            OverloadedError: every slot is in use or pinned.
        """
        if self._table.takes_requests(digest):
            return True
        if not self._table.can_have(digest):
            problem = f"{shorten_digest(digest)}: all slots of this node have pinned adapters"
            raise AdapterMissingError(f"adapter: {problem}")
        if load.reading is None and not self._table.has_read(digest):
            # Read one adapter at a time, because each takes memory.
            if not self._is_reading():
                load.reading = self._begin_reading(digest, load.commands[0][1].adapter_source)
            return False
        if load.reading is not None and not load.reading.done():
            return False
        began_at = self._clock()
        if load.read_at is None:
            load.read_at = began_at
        pinned, seconds = any(one.pins_adapter for _, one in load.commands), 0.0
        if load.reading is None:
            self._table.load_again(digest, pinned=pinned)
        else:
            adapter, seconds = load.reading.result()
            self._table.load(adapter, pinned=pinned)
        seconds += self._clock() - began_at
        self.load_s += (_FADING if self.load_s else 1.0) * (seconds - self.load_s)
        logger.info("loaded adapter %s in %.3g s", shorten_digest(digest), seconds)
        return True

    def _expire(self) -> Iterator[Failure]:
        """Remove the commands that have waited too long, and yield them as failures."""
        now = self._clock()
        for digest, load in self._loads.items():
            kept = []
            for received_at, command in load.commands:
                waited_s = now - received_at
                if waited_s > command.timeout_s:
                    yield Failure(command, "deadline passed", is_late=True)
                elif waited_s > LOAD_TIMEOUT_S:
                    problem = f"adapter: {shorten_digest(digest)} was not loaded within"
                    yield Failure(command, f"{problem} {LOAD_TIMEOUT_S:g} s: {load.problem}")
                else:
                    kept.append((received_at, command))
            load.commands = kept


def _be_nice() -> None:
    """Lower this thread's priority, so that other threads take precedence; only on Linux."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))
