"""UniprocExecutor: one worker, in this process. It fails with the process, or by raising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import Executor, PendingStep
from engine.worker.model_runner import LaunchedStep
from engine.worker.worker import Worker
from models.parallel.group import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class LaunchAhead:
    """A step whose launch is on its way."""

    launch: Future[LaunchedStep]

    def wait(self) -> ModelRunnerOutput:
        return self.launch.result().wait()


class UniprocExecutor:
    """See `engine.executors.base.Executor` for the contract."""

    def __init__(self, model_folder: Path, config: EngineConfig, ranks: Ranks = ALONE) -> None:
        self.worker = worker = Worker(model_folder, config, ranks)
        self.config = worker.config
        self.model_config = worker.model_config
        self.dtype = str(worker.dtype).removeprefix("torch.")
        self.max_model_len = worker.max_model_len
        self.kv_memory = worker.kv_memory
        self.runs_ahead = worker.runs_ahead
        self.thread = ThreadPoolExecutor(1, "model-runner") if worker.runs_ahead else None

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        prepared = self.worker.prepare(plan, hooks)
        if self.thread is None:
            return self.worker.launch(prepared, hooks)
        return LaunchAhead(self.thread.submit(self.worker.launch, prepared, hooks))

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        return {}

    def close(self) -> None:
        pass  # a worker of this process ends with it

    def check_health(self) -> None:
        pass  # a worker of this process is there as long as whoever asks

    def on_failure(self, call: Callable[[Exception], None]) -> None:
        pass  # what goes wrong is raised where the step is waited for


def worker_of(executor: Executor) -> Worker:
    """The one worker of a `UniprocExecutor`, for tests and benchmarks that look into it."""
    return cast("UniprocExecutor", executor).worker
