"""MultiprocExecutor: starts the other ranks as processes of this machine.

Each process inherits two private socket pairs, and a pipe whose end-of-file tells that the other
side is gone (the life line).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

from baton.engine_config import EngineConfig
from baton.processes.held_folder import HeldFolder
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import PendingStep
from engine.executors.devices import device_of_rank
from engine.executors.rank_process import ENCODER, Start
from engine.executors.rank_watch import STOPPED, process_state
from engine.executors.ranks import OtherRanks, RanksExecutor
from engine.worker.host.cores import cores_of_rank, on_cores
from models.parallel.shared_group import open_shared

# Prefix of the names of temporary folders, each of which is the rendezvous of one engine's ranks.
RANKS_PREFIX = "baton-ranks-"


class RankProcess:
    """The engine process's handle of one rank's process.

    Args:
        start: the first message to the rank; the rank inherits the descriptor of shared memory in
            this message.
    """

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.messages, theirs = Pipe()
        self.beside, beside = Pipe()
        read_end, self._life_line = os.pipe()
        descriptors = theirs.fileno(), read_end, beside.fileno()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.executors.rank_process", *map(str, descriptors)],
                pass_fds=[*descriptors, *([] if start.shared is None else [start.shared])],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            theirs.close()
            beside.close()
            os.close(read_end)
        self.messages.send_bytes(ENCODER.encode(start))

    def why_gone(self) -> str | None:
        """Return why the rank is gone; None while it runs."""
        code = self.process.poll()
        if code is not None:
            return f"rank {self.rank} (process {self.process.pid}) ended with {code}"
        if process_state(self.process.pid) in STOPPED:
            return f"rank {self.rank} (process {self.process.pid}) was stopped"
        return None

    def end_rank(self) -> None:
        """Kill the rank's process, and wait for its end."""
        self.messages.close()
        with contextlib.suppress(OSError):
            os.close(self._life_line)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class MultiprocExecutor(RanksExecutor):
    """Ranks on this machine; see `engine.executors.base.Executor` for the contract."""

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        device = device_of_rank(config, config.leader)
        folder = HeldFolder(RANKS_PREFIX)
        meeting = str(folder.path)
        level = logging.getLogger().getEffectiveLevel()
        sizes = (config.pipeline_parallel_size, config.tensor_parallel_size)
        shares = config.native_kernels and device.type == "cpu"
        shared = open_shared(*sizes) if shares else None
        try:
            ranks = [
                RankProcess(Start(str(model_folder), config, rank, meeting, level, shared))
                for rank in range(config.num_ranks)
                if rank != config.leader
            ]
            others = OtherRanks(ranks, folder.close)
            # The calling thread moves to the leading rank's cores only while it computes. If steps
            # run ahead, another thread computes, and stays on these cores.
            self._cores = cores_of_rank(config, config.leader)
            with on_cores(self._cores):
                super().__init__(model_folder, config, others, device, meeting, shared)
        finally:
            # All ranks have mapped the memory, or have failed, so nobody needs this descriptor
            if shared is not None:
                os.close(shared)

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        with on_cores(frozenset() if self.runs_ahead else self._cores):
            return super().submit(plan, hooks)
