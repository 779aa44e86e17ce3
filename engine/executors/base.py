"""Executor: computes the engine's steps on workers, in this process or others.

Refuses to know: tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from baton.adapters.files import Adapter, AdapterFiles
from baton.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import StepHooks, StepPlan
from models.config import ModelConfig

if TYPE_CHECKING:  # avoids importing torch here
    from engine.worker.kv_cache import KVMemory


class PendingStep(Protocol):
    """A step that was submitted to an executor."""

    def wait(self) -> ModelRunnerOutput:
        """Wait until the step's KV and tokens are computed.

        Return the step's result, or raise the error that ended the step.
        """


class Executor(Protocol):
    """A group of workers, each of which has KV memory and the model, or a part of the model.

    Owned by the engine's thread.

    Attributes:
        config: the engine's options; ``auto`` values are replaced by values for the workers'
            devices.
        model_config: configuration of the loaded model.
        dtype: name of the weights' dtype.
        linear_weights: description of the linear layers' weights; engines with equal descriptions
            compute equal results.
        max_model_len: maximum number of tokens of one request.
        kv_memory: KV memory of the worker in this process.
        runs_ahead: whether a step may be submitted before the previous one has ended; `submit` then
            returns at once. With one pipeline stage, the new step may compute tokens that the
            previous one samples (`UNKNOWN_TOKEN`). With several stages, one step per stage
            may be in flight, and all tokens that the steps compute are known.
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
        """Submit a step, which runs after all steps that were submitted before."""

    def check_adapter(self, files: AdapterFiles) -> None:
        """Raise AdapterError unless an adapter fits the model; safe from any thread."""

    def pack_adapter(self, adapter: Adapter) -> int:
        """Pack an adapter ahead of ``load_adapter``; return its packed size; safe from any thread.

        Returns 0 if the workers pack the adapter only while they load it. Raises AdapterError.
        """

    def keep_cores(self) -> AbstractContextManager[None]:
        """Keep other nodes off this process's cores inside this context; safe from any thread."""

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every worker between steps; return the results by rank.

        Raises TimeoutError if a worker has not answered within ``timeout_s``; a call in this
        process is not interrupted, so the error comes after the call has returned. Raises the
        AdapterError of a worker after all workers have run the method.
        """

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        """Run a function beside the steps, on a thread of each worker that is in another process.

        Args:
            entry: ``"package.module:function"``, called with a connection to this process, the
                worker's KV memory and the argument.

        Returns:
            The connections to these functions, by rank. Call `attach` only once.
        """

    def rest(self) -> None:
        """Announce that no step can be submitted now, so that other nodes may use these cores."""

    def do_idle_work(self, num_used_blocks: int, num_expected_blocks: int = 0) -> bool:
        """Do a little work that can wait, such as touching KV memory; return whether more is left.

        Args:
            num_used_blocks: number of KV blocks that were ever allocated.
            num_expected_blocks: number of further blocks that may be filled at once.
        """

    def expert_loads(self) -> tuple[float, float]:
        """Return how many rows experts had so far: those of the busiest rank, and of a mean rank.

        A row is a pair of a token and one of its experts. The busiest rank is found anew in each
        layer and step. Safe from any thread. Returns zeros unless ranks divide the experts.
        """

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone, a step has failed, or a call was late."""

    def close(self) -> None:
        """Stop the workers; afterwards no step can be submitted. May be called twice."""
