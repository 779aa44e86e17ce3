"""Executor: what the engine needs of whoever computes its steps, wherever that is. No tensor."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import StepHooks, StepPlan
from models.config import ModelConfig

if TYPE_CHECKING:  # nodes hand its memory to a connector; the engine looks at numbers alone
    from engine.worker.kv_cache import KVMemory


class PendingStep(Protocol):
    """A step that was submitted."""

    def wait(self) -> ModelRunnerOutput:
        """What came of it, when its KV is in the cache; raises what computing it raised."""


class Executor(Protocol):
    """Workers, each with a model or a part of it and with KV memory. The engine's thread owns it.

    Attributes:
        config: as it is for the workers' devices.
        model_config: of the model that they have loaded.
        dtype: of its weights, by name.
        linear_weights: how its linear layers are kept: alike only where they compute alike.
        max_model_len: most tokens of one request.
        kv_memory: of the worker in this process.
        runs_ahead: whether a step may be submitted before the one before has ended; then
            `submit` returns at once.
    """

    config: EngineConfig
    model_config: ModelConfig
    dtype: str
    linear_weights: str
    max_model_len: int
    kv_memory: KVMemory
    runs_ahead: bool

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        """Start the workers and load the model; raises ModelLoadError or ConfigError."""

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        """Have a step computed, behind those that were submitted before."""

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every worker between steps; what each of them returns, by rank.

        Raises TimeoutError when one has answered later than ``timeout_s``, or not at all. A worker
        of this process cannot be left waiting: there it is raised when the call has ended.
        """

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        """Have each other worker run a function on a thread of its own, beside its steps.

        Args:
            entry: ``"package.module:function"``, called with a connection to this process, the
                worker's KV memory and the argument.

        Returns:
            The connections, by rank; once in an executor's life.
        """

    def rest(self) -> None:
        """There is nothing to submit for now: cores that are shared may compute for others."""

    def do_idle_work(self, num_used_blocks: int) -> bool:
        """Do a little work that can wait; return whether there is more of it now.

        Args:
            num_used_blocks: blocks of the KV cache that any request has had.
        """

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone, a step has failed, or a call was late."""

    def close(self) -> None:
        """End the workers; nothing is submitted any more. May be called twice."""
