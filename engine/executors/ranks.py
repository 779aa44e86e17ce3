"""RanksExecutor: runs one rank in this process, and the others in processes started elsewhere.

    engine ── plan ──> rank 2 (here: the first of the last stage, which samples)
                  ├──> rank 0   a connection and a life line to each
                  └──> rank 1 ...

All ranks end together: the other ranks end with this process, and this executor fails when another
rank is gone. Refuses to know: the meaning of plans, how ranks are started.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from baton.adapters.digest import AdapterError
from baton.adapters.files import Adapter, AdapterFiles
from baton.api import errors
from baton.api.errors import EngineDeadError
from baton.engine_config import EngineConfig
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import PendingStep
from engine.executors.rank_process import (
    ENCODER,
    FROM_RANK,
    Answer,
    Attach,
    Call,
    Failure,
    Step,
)
from engine.executors.uniproc import UniprocExecutor
from models.parallel.group import CollectiveError
from models.parallel.torch_group import connect

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.2


class OtherRank(Protocol):
    """A rank in another process.

    Attributes:
        rank: the rank's number.
        messages: connection for step plans, calls of methods, and answers.
        beside: connection for the function that `Executor.attach` runs in the rank.
    """

    rank: int
    messages: Connection
    beside: Connection

    def why_gone(self) -> str | None:
        """Return why the rank is gone, or None while it runs; called by one thread every 0.2 s."""

    def end_rank(self) -> None:
        """End the rank's process, or close the connections that keep it alive."""


class OtherRanks:
    """All ranks but the leader. A thread watches the ranks, and ends all when one is gone.

    Args:
        ranks: the ranks, in order.
        clean: called when all ranks have ended.
    """

    def __init__(self, ranks: Sequence[OtherRank], clean: Callable[[], None]) -> None:
        self.ranks = ranks
        self._clean = clean
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.failure: EngineDeadError | None = None
        # Makes the leader's computing thread stop waiting for other ranks.
        self.on_end: Callable[[], None] | None = None
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK_EVERY_S):
            gone = next(filter(None, (rank.why_gone() for rank in self.ranks)), None)
            if gone is not None and not self._ending.is_set():
                logger.critical("%s; the others end with it", gone)
                self.failure = EngineDeadError(gone)
                self.end_all()
                return

    def send(self, message: Step | Call | Attach) -> None:
        """Send a message to all these ranks."""
        content = ENCODER.encode(message)
        for rank in self.ranks:
            rank.messages.send_bytes(content)

    def answers(self, deadline: float) -> list[Any]:
        """Return the next answer of each rank; raise a rank's exception, or TimeoutError.

        An AdapterError is raised after all ranks have answered, because all ranks continue after
        this error.
        """
        values, problem = list[Any](), None
        for rank in self.ranks:
            try:
                values.append(_answer(rank, deadline))
            except AdapterError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return values

    @contextlib.contextmanager
    def failing_as_one(self) -> Iterator[None]:
        """End the other ranks if the block raises: they would wait for the leader forever."""
        try:
            yield
        except (CollectiveError, OSError) as error:
            deadline = time.monotonic() + 3 * _LOOK_EVERY_S
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S / 10)  # time for `_watch` to find out which rank is gone
            self.fail(f"ranks cannot be reached: {error}")
            raise cast("EngineDeadError", self.failure) from error
        except BaseException as error:
            self.fail(f"a step of rank 0 failed: {error}")
            raise

    def fail(self, why: str) -> None:
        """End all ranks for good; keep the reason of the first call."""
        self.failure = self.failure or EngineDeadError(why)
        self.end_all()

    def end_all(self) -> None:
        """End all ranks; may be called twice."""
        with self._lock:
            if not self._ending.is_set():
                self._ending.set()
                if self.on_end is not None:
                    self.on_end()
                for rank in self.ranks:
                    rank.end_rank()
                self._clean()


class _Pending:
    """A step that all ranks compute; the leader, in this process, returns the result."""

    def __init__(
        self, step: PendingStep, ranks: OtherRanks, raise_if_stopped: Callable[[], None]
    ) -> None:
        self._step, self._ranks, self._raise_if_stopped = step, ranks, raise_if_stopped

    def wait(self) -> Any:
        """Wait for the leader's part of the step; see `PendingStep.wait`."""
        with self._ranks.failing_as_one():
            result = self._step.wait()
            self._raise_if_stopped()  # a stopped sum on a GPU ends as if it were complete
            return result


def _answer(rank: OtherRank, deadline: float) -> Any:
    try:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not rank.messages.poll(left_s):
            raise TimeoutError(f"rank {rank.rank} has not answered in time")
        answer: Answer | Failure = FROM_RANK.decode(rank.messages.recv_bytes())
    except (EOFError, OSError) as error:
        raise EngineDeadError(f"rank {rank.rank} is gone") from error
    if isinstance(answer, Failure):
        if answer.kind == AdapterError.__name__:
            raise AdapterError(answer.message)
        raise getattr(errors, answer.kind, EngineDeadError)(answer.message)
    return answer.value


class RanksExecutor:
    """Runs steps on several ranks; see `engine.executors.base.Executor` for the contract.

    Args:
        others: the other ranks, which have got their first message and are starting.
        device: the leading rank's device, the current device of the calling thread.
        meeting: address of the rendezvous of all ranks, see ``TorchGroup``.
        shared: descriptor of memory that ranks of this machine share, see `connect`.
    """

    def __init__(
        self,
        model_folder: Path,
        config: EngineConfig,
        others: OtherRanks,
        device: torch.device,
        meeting: str,
        shared: int | None = None,
    ) -> None:
        self._others = others
        self._leader = config.leader
        weakref.finalize(self, others.end_all)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            sizes = config.num_ranks, config.tensor_parallel_size
            ranks = connect(config.leader, *sizes, meeting, device, shared, config.rank_sums)
            others.on_end, self._raise_if_stopped = ranks.abort, ranks.raise_if_stopped
            self._local = local = UniprocExecutor(model_folder, config, ranks, device)
            others.answers(deadline)
        except (CollectiveError, RuntimeError) as error:
            # Prefer the error of another rank, which may be the cause of this one.
            with contextlib.suppress(TimeoutError):
                others.answers(min(deadline, time.monotonic() + 1.0))
            others.end_all()
            raise others.failure or error from error
        except BaseException:
            others.end_all()
            raise
        self.worker = local.worker
        self.config = local.config
        self.model_config = local.model_config
        self.dtype, self.linear_weights = local.dtype, local.linear_weights
        self.max_model_len = local.max_model_len
        self.kv_memory = local.kv_memory
        self.runs_ahead = local.runs_ahead

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        self.check_health()
        eager = hooks.after_layer is not None
        with self._others.failing_as_one():
            self._others.send(Step(plan, eager))
            pending = self._local.submit(plan, hooks)
            return _Pending(pending, self._others, self._raise_if_stopped)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        deadline = time.monotonic() + (START_TIMEOUT_S if timeout_s is None else timeout_s)
        self.check_health()
        own = list[Any]()
        problem: AdapterError | TimeoutError | None = None
        with self._others.failing_as_one():
            self._others.send(Call(method, list(args)))
            try:
                own = self._local.collective_rpc(method, args, timeout_s)
            except (AdapterError, TimeoutError) as error:
                problem = error
        try:
            if isinstance(problem, TimeoutError):
                raise problem
            values = self._others.answers(deadline)
        except TimeoutError as error:  # so that a late answer is not taken for the next call's
            self._others.fail(str(error))
            raise
        if problem is not None:
            raise problem
        return values[: self._leader] + own + values[self._leader :]

    def check_adapter(self, files: AdapterFiles) -> None:
        self._local.check_adapter(files)

    def pack_adapter(self, adapter: Adapter) -> int:
        return 0  # packing sums over ranks, too, and its sums must not mix with a step's

    def keep_cores(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: ranks do not lend cores to other nodes."""
        return contextlib.nullcontext()

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        self.check_health()
        self._others.send(Attach(entry, argument))
        self._others.answers(time.monotonic() + START_TIMEOUT_S)
        return {rank.rank: rank.beside for rank in self._others.ranks}

    def rest(self) -> None:
        """Do nothing: ranks do not lend cores to other nodes."""

    def do_idle_work(self, num_used_blocks: int, num_expected_blocks: int = 0) -> bool:
        """Return False: several ranks never populate KV memory ahead of use."""
        return False

    def expert_loads(self) -> tuple[float, float]:
        return self._local.expert_loads()

    def check_health(self) -> None:
        if self._others.failure is not None:
            raise self._others.failure

    def close(self) -> None:
        self._others.end_all()
