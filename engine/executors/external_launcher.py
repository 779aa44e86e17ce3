"""ExternalLauncherExecutor: a launcher (torchrun, SLURM, MPI, Kubernetes) starts all ranks alike.

In the leader's process, the constructor returns an engine's executor. In all other processes, the
constructor does not return: the process serves as a rank until the engine ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from engine.executors.devices import device_of_rank
from engine.executors.meeting import Invitation, Meeting, attend, start_all
from engine.executors.ranks import START_TIMEOUT_S, OtherRanks, RanksExecutor
from models.parallel.torch_group import launchers_store, own_address

_INVITATION = "baton/invitation"
# Environment variables with the rank and the number of ranks, one pair per launcher (torchrun,
# SLURM, Open MPI); the first pair that is set is used.
_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),  # an indexed Kubernetes job
)
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """One process's place in the job that a launcher started.

    Attributes:
        rank: the process's rank, from 0.
        size: number of processes.
        host: host of rank 0.
        port: port on that host where the processes meet.
    """

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read the place from a launcher's variables; raises ConfigError if they are wrong."""
        names = next((both for both in _NAMES if all(environment.get(n) for n in both)), None)
        if names is None:
            known = ", ".join(" and ".join(both) for both in _NAMES)
            raise ConfigError(f"executor: external_launcher finds none of {known} in environment")
        missing = [name for name in _MASTER if not environment.get(name)]
        if missing:
            raise ConfigError(f"executor: external_launcher needs {' and '.join(missing)}")
        numbers = []
        for name in (*names, "MASTER_PORT"):
            if not environment[name].isdecimal():
                raise ConfigError(f"{name}: must be a number, got {environment[name]!r}")
            numbers.append(int(environment[name]))
        rank, size, port = numbers
        if rank >= size:
            raise ConfigError(f"{names[0]}: must be below {names[1]} ({size}), got {rank}")
        return cls(rank, size, environment["MASTER_ADDR"], port)


class ExternalLauncherExecutor(RanksExecutor):
    """Ranks that a launcher has started; see `engine.executors.base.Executor` for the contract.

    On all ranks but the leader, the constructor does not return: it raises SystemExit when the
    engine ends.
    """

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        place = Place.of(os.environ)
        if place.size != config.num_ranks:
            raise ConfigError(
                f"tensor_parallel_size: with pipeline_parallel_size it makes {config.num_ranks} "
                f"ranks, but the launcher has started {place.size}"
            )
        # Choose the device before any rank waits for another, so that a lack of GPUs ends the job
        # at once.
        device = device_of_rank(config, place.rank)
        store = launchers_store(place.rank, place.size, place.host, place.port)
        if place.rank != config.leader:
            attend(Invitation.decode(store.get(_INVITATION)), place.rank, model_folder)
            raise SystemExit
        # Ranks know only the host of rank 0, so the engine must run there.
        host = place.host if place.rank == 0 else own_address(place.host, place.port)
        meeting = Meeting(host, [rank for rank in range(place.size) if rank != place.rank])
        store.set(_INVITATION, meeting.invitation.encode())
        # Keep both sockets open, because other ranks use them while this rank lives.
        self._stores = meeting, store
        ranks = meeting.wait(START_TIMEOUT_S, lambda: None)
        others = OtherRanks(ranks, lambda: None)
        start_all(ranks, meeting, model_folder, config)
        super().__init__(model_folder, config, others, device, meeting.address)
