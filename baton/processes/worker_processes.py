"""WorkerProcesses: runs work on clients' inputs in worker processes, which can be killed.

The kind of work is given by a function. A template process (`worker_template`) loads the code and
data of the work once, and forks a new worker within milliseconds whenever a worker has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton.api.errors import InvalidRequestError, NodeUnavailableError, OverloadedError
from baton.processes.child_processes import PYTHON_MODULE
from baton.processes.early_template import ENVIRONMENT, EarlyTemplate, ForkedProcess
from baton.processes.worker_template import (
    ANSWER,
    COMMAND,
    DONE,
    FORK,
    KILL,
    LENGTH,
    READY,
    REFUSED,
    Setup,
    WorkLimits,
)

__all__ = ["WorkLimitError", "WorkLimits", "WorkerProcesses"]

logger = logging.getLogger(__name__)

# A worker whose time is over ends itself; if not, it is killed after these additional seconds.
_GRACE_S = 5.0
_POLL_S = 0.05
# Maximum time for a template to load code and data, which takes some seconds, or more if the
# machine is busy.
_START_S = 120.0
# Number of workers that try a piece of work, if workers end for reasons other than the work.
_MAX_TRIES = 3


Template = subprocess.Popen[bytes] | ForkedProcess


class WorkLimitError(Exception):
    """A piece of work exceeded its limits; callers turn this into an error for the client."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker process, as the parent sees it.

    Attributes:
        template: process that forked the worker; the kernel ends the worker with it.
        is_ready: whether the worker has reported that it waits for work.
    """

    number: int
    link: socket.socket
    template: Template
    is_ready: bool = False

    async def wait_ready(self) -> None:
        """Wait until the worker is ready for work.

        Raises:
            ConnectionError: the worker ended before it was ready.
            NodeUnavailableError: the template did not load in time and was killed.
        """
        if self.link.fileno() < 0:
            raise ConnectionError("no file descriptor was left for the worker")
        if self.is_ready:
            return
        try:
            async with asyncio.timeout(_START_S):
                self.is_ready = await self._receive(len(READY)) == READY
        except TimeoutError:
            # The template hangs; the next piece of work will start a new template.
            self.template.kill()
            problem = f"a process that reads requests has not started in {_START_S:g} s; try again"
            raise NodeUnavailableError(problem) from None
        if not self.is_ready:
            raise ConnectionError("the worker ended before it was ready")

    async def ask(self, work: bytes) -> tuple[bytes, bool]:
        """Send work; return the answer (empty: the worker died), and whether the worker has ended.

        Raises:
            ConnectionError: the worker ended before it read the work, so the work is not the cause.
        """
        await asyncio.get_running_loop().sock_sendall(self.link, LENGTH.pack(len(work)) + work)
        if header := await self._receive(ANSWER.size):
            num_bytes, is_last = ANSWER.unpack(header)
            answer = await self._receive(num_bytes)
            return answer, is_last or not answer
        return b"", True

    async def _receive(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(
                self.link, min(num_bytes - len(received), 2**20)
            )
            if not part:
                return b""
            received += part
        return bytes(received)


class WorkerProcesses:
    """Runs one kind of work in worker processes, each piece within limits. Used on one event loop.

    The processes start at the first piece of work or at `start`, and end with this process at the
    latest. Callers take turns, and a caller who has busy workers never gets the last free worker.

    Args:
        work: ``"module:function"`` that takes ``options`` and returns the function for the work.
        limits: limits of one piece of work.
        num_workers: number of worker processes, at least 2.
        max_waiting: maximum number of pieces of work that wait, of which one caller may have half.
        early: worker template that was forked for this work; None: start a template as a new
            process.
    """

    def __init__(
        self,
        work: str,
        options: Mapping[str, str],
        limits: WorkLimits,
        *,
        num_workers: int = 3,
        max_waiting: int = 4096,
        early: EarlyTemplate | None = None,
    ) -> None:
        assert num_workers >= 2
        self.limits = limits
        self._setup = Setup(work=work, options=dict(options), limits=limits)
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._early = early
        self._template: Template | None = None
        self._control: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}  # sockets of all workers in use, by number
        self._idle: list[_Worker] = []
        self._active: Counter[str] = Counter()  # number of busy workers per caller
        # The caller that has waited longest for a turn is first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[_Worker]]] = OrderedDict()
        self._num_waiting = 0
        self._finalizer: weakref.finalize[..., WorkerProcesses] | None = None

    def start(self) -> None:
        """Start the processes, so that the first piece of work does not wait for them.

        Raises:
            NodeUnavailableError: a process cannot be started for lack of a resource.
        """
        is_new = self._template is None
        try:
            if self._template is None:
                self._start_template()
                self._idle = [self._fork() for _ in range(self._num_workers)]
            elif self._template.poll() is not None:
                self._restart_template()
        except OSError as error:
            if is_new:
                self.close()
                self._template = None
            raise NodeUnavailableError(
                f"no process can be started to read requests: {error}; try again"
            ) from None

    async def run(self, work: bytes, *, caller: str = "") -> bytes:
        """Return the result of a piece of work. Cancelling this ends the worker.

        Args:
            caller: the caller's name, for taking turns.

        Raises:
            InvalidRequestError: raised by the work.
            WorkLimitError: the work exceeded its limits.
            OverloadedError: too much work waits.
            NodeUnavailableError: processes could not be started, or ended several times, or the
                work got no CPU time.
        """
        self.start()
        worker = await self._take(caller)
        answer, has_ended = b"", True
        try:
            for _ in range(_MAX_TRIES):
                has_ended = True
                answer, has_ended, was_read = await self._ask(worker, work)
                if answer or (not await self._has_ended(worker.template) and was_read):
                    break
                # The worker ended before it read the work: when memory is short, the kernel kills
                # idle workers first, and if it kills the template, the workers end, too. The work
                # is not the cause.
                worker = self._replace(worker)
            else:
                raise NodeUnavailableError("a process that reads requests ended; try again")
        finally:
            if has_ended:
                worker = self._replace(worker)
            self._give_back(worker, caller)
        if answer[:1] == DONE:
            return answer[1:]
        if answer[:1] == REFUSED:
            raise InvalidRequestError(*msgspec.json.decode(answer[1:], type=tuple[str, str]))
        raise WorkLimitError(f"takes more than {self.limits} of memory")

    async def wait_ready(self) -> None:
        """Start the processes and wait until a worker is ready.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        self.start()
        worker = await self._take("")
        try:
            await worker.wait_ready()
        except ConnectionError:
            raise NodeUnavailableError("a process that reads requests ended at its start") from None
        finally:
            self._give_back(worker if worker.is_ready else self._replace(worker), "")

    async def _ask(self, worker: _Worker, work: bytes) -> tuple[bytes, bool, bool]:
        """Let a worker do a piece of work. The time limit begins when the worker is ready.

        Returns:
            The answer, empty if there is none; whether the worker has ended; whether the worker may
            have read the work.

        Raises:
            NodeUnavailableError: no answer came in time, perhaps not because of the work.
        """
        answer, has_ended = b"", True
        try:
            await worker.wait_ready()
            began_at = time.monotonic()
            async with asyncio.timeout(self.limits.wall_s + _GRACE_S):
                answer, has_ended = await worker.ask(work)
        except ConnectionError:
            return b"", True, False
        except TimeoutError:
            # The worker hangs and has not ended itself within its time limit.
            pass
        if not answer and time.monotonic() - began_at >= self.limits.wall_s:
            # With CPU time, the worker would have reached its CPU limit first, so it got no CPU
            # time.
            raise NodeUnavailableError(
                f"this machine did not read the request in {self.limits.wall_s:g} s; try again"
            )
        return answer, has_ended, True

    def close(self) -> None:
        """End the processes; garbage collection of this object does this, too."""
        if self._finalizer is not None:
            self._finalizer()

    # ------------------------------------------------------------------ turns

    async def _take(self, caller: str) -> _Worker:
        """Wait for the caller's turn and take an idle worker."""
        if self._idle and caller not in self._waiting and self._may_have(caller):
            self._active[caller] += 1
            return self._idle.pop()
        queue = self._waiting.setdefault(caller, deque())
        if self._num_waiting >= self._max_waiting or len(queue) >= self._max_waiting // 2:
            if not queue:
                del self._waiting[caller]
            raise OverloadedError(
                f"{self._num_waiting} texts wait to be read; a caller may have "
                f"{self._max_waiting // 2}, all together {self._max_waiting}"
            )
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        queue.append(future)
        self._num_waiting += 1
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self._give_back(future.result(), caller)
            raise

    def _may_have(self, caller: str) -> bool:
        return self._active[caller] < self._num_workers - 1

    def _give_back(self, worker: _Worker, caller: str) -> None:
        self._active[caller] -= 1
        if not self._active[caller]:
            del self._active[caller]
        self._idle.append(worker)
        while self._idle:
            waiting = next((name for name in self._waiting if self._may_have(name)), None)
            if waiting is None:
                return
            queue = self._waiting[waiting]
            future = queue.popleft()
            self._num_waiting -= 1
            self._waiting.move_to_end(waiting)
            if not queue:
                del self._waiting[waiting]
            # A caller that has given up has cancelled its future.
            if not future.done():
                self._active[waiting] += 1
                future.set_result(self._idle.pop())

    # ------------------------------------------------------------------ processes

    def _start_template(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            self._template, ours = early.process, early.control
        else:
            self._template, ours = _spawn_template()
        # the template has ended, which the callers of its workers will notice
        with contextlib.suppress(ConnectionError):
            ours.send(msgspec.json.encode(self._setup))
        self._control = ours
        self._finalizer = weakref.finalize(self, _end, self._template, ours, self._links)

    def _fork(self) -> _Worker:
        """Ask the template for a new worker, which is ready once the template is loaded."""
        assert self._control is not None
        assert self._template is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = _Worker(next(self._numbers), ours, self._template)
        self._links[worker.number] = ours
        with theirs:
            command = COMMAND.pack(FORK, worker.number)
            # If the template has ended, the caller of this worker will notice.
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._control, [command], [theirs.fileno()])
        return worker

    def _replace(self, worker: _Worker) -> _Worker:
        """End a worker, and return a new worker.

        Returns the ended worker if the process has no descriptor left for a new worker; the next
        caller then tries again.
        """
        assert self._control is not None
        self._links.pop(worker.number, worker.link).close()
        with contextlib.suppress(ConnectionError):
            self._control.send(COMMAND.pack(KILL, worker.number))
        try:
            return self._fork()
        except OSError as error:
            logger.error("cannot start a worker: %s", error)
            return worker

    async def _has_ended(self, template: Template) -> bool:
        """Return whether this template has ended; if so, replace it."""
        if template.poll() is None:
            # The sockets of a process close shortly before the system shows that the process has
            # ended.
            await asyncio.sleep(_POLL_S)
        if template.poll() is None:
            return False
        if self._template is template:
            self.start()
        return True

    def _restart_template(self) -> None:
        """Replace a template that has ended, with its idle workers.

        Busy workers are replaced later, by their callers, who still read from the workers' sockets:
        if such a socket were closed now, its reader might read from a new socket with the same
        descriptor.
        """
        template, control, finalizer = self._template, self._control, self._finalizer
        assert template is not None
        assert control is not None
        assert finalizer is not None
        logger.error("a worker template ended with exit code %s", template.returncode)
        finalizer.detach()
        control.close()
        for worker in self._idle:
            self._links.pop(worker.number, worker.link).close()
        self._start_template()
        self._idle = [self._fork() for _ in self._idle]


def _spawn_template() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a template as a new process; return it with its control socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template = subprocess.Popen(
        [*PYTHON_MODULE, "baton.processes.worker_template", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **ENVIRONMENT},
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # Ctrl-C is for the program, which may have requests to finish
    )
    theirs.close()
    return template, ours


def _end(template: Template, control: socket.socket, links: dict[int, socket.socket]) -> None:
    """End the template, and with it its workers."""
    control.close()
    for link in links.values():
        link.close()
    links.clear()
    template.kill()
    template.wait()
