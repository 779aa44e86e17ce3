"""MultiprocExecutor: a rank in this process, and the others in processes that it starts.

    engine ── plan ──> rank 2 (here: the first of the last stage, which samples)
                  ├──> rank 0   a socket pair each; nobody else can write to it
                  └──> rank 1 ...

The ranks end as one: each ends when this process is gone, and this one fails when one of them is.
Refuses to know: what a plan is for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from baton.api import errors
from baton.api.errors import EngineDeadError
from baton.engine_config import EngineConfig
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import PendingStep
from engine.executors.rank_process import (
    ENCODER,
    FROM_RANK,
    Answer,
    Call,
    Failure,
    Start,
    Step,
)
from engine.executors.uniproc import UniprocExecutor
from models.parallel.group import CollectiveError
from models.parallel.torch_group import connect

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.2
_STOPPED = ("T", "t")  # in /proc/PID/stat: by a signal, or by a debugger


class RankProcess:
    """One rank in a process of its own, as this process sees it.

    Args:
        start: what it is to be.
    """

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.messages, theirs = Pipe()
        read_end, self._life_line = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.executors.rank_process",
                 str(theirs.fileno()), str(read_end)],
                pass_fds=(theirs.fileno(), read_end),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(read_end)
        self.messages.send_bytes(ENCODER.encode(start))

    def answer(self, deadline: float) -> Answer:
        """What it says next; raises what it raised, or TimeoutError."""
        try:
            if not self.messages.poll(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"rank {self.rank} has not answered in time")
            answer: Answer | Failure = FROM_RANK.decode(self.messages.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDeadError(f"rank {self.rank} is gone") from error
        if isinstance(answer, Failure):
            raise getattr(errors, answer.kind, EngineDeadError)(answer.message)
        return answer

    def why_gone(self) -> str | None:
        """What became of it; None: it runs."""
        code = self.process.poll()
        if code is not None:
            return f"rank {self.rank} (process {self.process.pid}) ended with {code}"
        if _state(self.process.pid) in _STOPPED:
            return f"rank {self.rank} (process {self.process.pid}) was stopped"
        return None

    def end(self) -> None:
        """End it, and wait for that."""
        self.messages.close()
        with contextlib.suppress(OSError):
            os.close(self._life_line)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _state(pid: int) -> str:
    """Of a process, as the kernel calls it; empty where nobody can say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class _Ranks:
    """All other ranks. Ends them, as one, when one is gone."""

    def __init__(self, ranks: Sequence[RankProcess], folder: Path) -> None:
        self.ranks = ranks
        self._folder = folder
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.failure: EngineDeadError | None = None
        self.on_failure: Callable[[Exception], None] | None = None
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK_EVERY_S):
            gone = next(filter(None, (rank.why_gone() for rank in self.ranks)), None)
            if gone is not None:
                logger.critical("%s; the others end with it", gone)
                self.failure = EngineDeadError(gone)
                self.end()
                if self.on_failure is not None:
                    self.on_failure(self.failure)
                return

    @contextlib.contextmanager
    def failing_as_one(self) -> Iterator[None]:
        """What fails on this rank ends the others, which wait for it in vain."""
        try:
            yield
        except (CollectiveError, OSError) as error:
            deadline = time.monotonic() + 3 * _LOOK_EVERY_S
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S / 10)  # the watch is about to find why
            self.failure = self.failure or EngineDeadError(f"ranks cannot be reached: {error}")
            self.end()
            raise self.failure from error
        except BaseException as error:
            self.failure = self.failure or EngineDeadError(f"a step of rank 0 failed: {error}")
            self.end()
            raise

    def end(self) -> None:
        """End all of them; may be called twice."""
        with self._lock:
            if not self._ending.is_set():
                self._ending.set()
                for rank in self.ranks:
                    rank.end()
                shutil.rmtree(self._folder, ignore_errors=True)


class _Pending:
    """A step of all ranks; what this one's gives is its result."""

    def __init__(self, step: PendingStep, ranks: _Ranks) -> None:
        self._step, self._ranks = step, ranks

    def wait(self) -> Any:
        """See `PendingStep`."""
        with self._ranks.failing_as_one():
            return self._step.wait()


class MultiprocExecutor:
    """See `engine.executors.base.Executor` for the contract."""

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        size, stage_size = config.num_ranks, config.tensor_parallel_size
        leader = size - stage_size  # see `Ranks`
        folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        level = logging.getLogger().getEffectiveLevel()
        starts = [
            Start(str(model_folder), config, rank, str(folder), level)
            for rank in range(size)
            if rank != leader
        ]
        self._ranks = ranks = _Ranks([RankProcess(start) for start in starts], folder)
        weakref.finalize(self, ranks.end)
        deadline = time.monotonic() + _START_TIMEOUT_S
        try:
            ranks_here = connect(leader, size, stage_size, folder, torch.device("cpu"))
            self._local = local = UniprocExecutor(model_folder, config, ranks_here)
        except (CollectiveError, RuntimeError) as error:
            for rank in ranks.ranks:  # it may have said why
                rank.answer(min(deadline, time.monotonic() + 1.0))
            ranks.end()
            raise ranks.failure or error from error
        except BaseException:
            ranks.end()
            raise
        for rank in ranks.ranks:
            rank.answer(deadline)
        self._leader = leader
        self.worker = local.worker
        self.config = local.config
        self.model_config = local.model_config
        self.dtype = local.dtype
        self.max_model_len = local.max_model_len
        self.kv_memory = local.kv_memory
        self.runs_ahead = local.runs_ahead

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        self.check_health()
        eager = hooks.after_layer is not None
        with self._ranks.failing_as_one():
            self._send(Step(plan, eager))
            return _Pending(self._local.submit(plan, hooks), self._ranks)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        deadline = time.monotonic() + (_START_TIMEOUT_S if timeout_s is None else timeout_s)
        self.check_health()
        self._send(Call(method, list(args)))
        own = self._local.collective_rpc(method, args, timeout_s)
        values = [rank.answer(deadline).value for rank in self._ranks.ranks]
        return values[: self._leader] + own + values[self._leader :]

    def check_health(self) -> None:
        if self._ranks.failure is not None:
            raise self._ranks.failure

    def on_failure(self, call: Callable[[Exception], None]) -> None:
        self._ranks.on_failure = call

    def close(self) -> None:
        self._ranks.end()

    def _send(self, message: Step | Call) -> None:
        content = ENCODER.encode(message)
        for rank in self._ranks.ranks:
            rank.messages.send_bytes(content)


__all__ = ["Connection", "MultiprocExecutor", "RankProcess"]
