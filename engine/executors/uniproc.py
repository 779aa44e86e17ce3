"""UniprocExecutor: runs one worker in this process, perhaps on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from baton.adapters.files import Adapter, AdapterFiles
from baton.api.errors import EngineDeadError
from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import Executor, PendingStep
from engine.executors.devices import device_of_rank
from engine.sampling.step_sampler import LaunchedStep
from engine.worker.kv_cache import dtype_name
from engine.worker.worker import Worker
from models.parallel.group import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A submitted step, which is launched or waits to be launched."""

    launched: Callable[[], LaunchedStep]
    note_failure: Callable[[Exception], None]

    def wait(self) -> ModelRunnerOutput:
        try:
            return self.launched().wait()
        except Exception as error:
            self.note_failure(error)
            raise


class UniprocExecutor:
    """One worker in this process; see `engine.executors.base.Executor` for the contract.

    Args:
        ranks: connection between the ranks that share the model; the default has a single rank.
        device: the worker's device; None: choose the device as for a single rank.
    """

    def __init__(
        self,
        model_folder: Path,
        config: EngineConfig,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,
    ) -> None:
        device = device or device_of_rank(config, 0)
        self.worker = worker = Worker(model_folder, config, device, ranks)
        self.config = worker.config
        self.model_config = worker.model_config
        self.dtype = dtype_name(worker.dtype)
        self.linear_weights = worker.linear_weights
        self.max_model_len = worker.max_model_len
        self.kv_memory = worker.kv_memory
        self.runs_ahead = worker.runs_ahead
        self.thread = ThreadPoolExecutor(1, "model-runner") if worker.runs_ahead else None
        if self.thread is not None:
            # Start the thread now, because the system may have no thread left later.
            self.thread.submit(int).result()
        self._failure: str | None = None

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        try:
            prepared = self.worker.prepare(plan, hooks)
            if self.thread is not None:
                launch = self.thread.submit(self.worker.launch, prepared, hooks)
                return SubmittedStep(launch.result, self._note_failure)
            launched = self.worker.launch(prepared, hooks)
        except Exception as error:
            self._note_failure(error)
            raise
        return SubmittedStep(lambda: launched, self._note_failure)

    def _note_failure(self, error: Exception) -> None:
        self._failure = self._failure or f"a step failed: {error}"

    def check_adapter(self, files: AdapterFiles) -> None:
        self.worker.check_adapter(files)

    def pack_adapter(self, adapter: Adapter) -> int:
        return self.worker.pack_adapter(adapter)

    def keep_cores(self) -> AbstractContextManager[None]:
        return self.worker.keep_cores()

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        started, call = time.monotonic(), getattr(self.worker, method)
        # Run calls on the step thread, after submitted steps: a call may change what steps read.
        value = call(*args) if self.thread is None else self.thread.submit(call, *args).result()
        if timeout_s is not None and time.monotonic() - started >= timeout_s:
            self._failure = f"{method} took longer than {timeout_s} s"
            raise TimeoutError(self._failure)
        return [value]

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        return {}

    def rest(self) -> None:
        if self.thread is None:
            self.worker.rest()
        else:  # the step thread has borrowed other nodes' cores, so it must return them
            self.thread.submit(self.worker.rest).result()

    def do_idle_work(self, num_used_blocks: int, num_expected_blocks: int = 0) -> bool:
        return self.worker.do_idle_work(num_used_blocks, num_expected_blocks)

    def expert_loads(self) -> tuple[float, float]:
        return self.worker.expert_loads()

    def check_health(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown()
        self.worker.close()


def worker_of(executor: Executor) -> Worker:
    """Return the worker of a `UniprocExecutor`, for tests and benchmarks."""
    return cast("UniprocExecutor", executor).worker
