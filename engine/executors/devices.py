"""Devices of ranks: chooses a rank's device from the options and the launcher's variables.

    multiproc            rank 2 takes the third GPU of --devices, or the third visible GPU
    ray                  each actor takes the GPU that Ray made visible to the actor
    external_launcher    LOCAL_RANK 2 takes the third GPU of --devices, or the third visible GPU

Refuses to know: how ranks start and connect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig, parse_devices
from engine.worker.device_choice import choose_device

# Environment variables with a process's number on its machine, one per launcher: torchrun, SLURM,
# Open MPI.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def device_of_rank(
    config: EngineConfig, rank: int, environment: Mapping[str, str] | None = None
) -> torch.device:
    """Return the device of a rank in this process, and make it the thread's current device.

    Args:
        config: options of all ranks.
        rank: number of the rank.
        environment: environment variables that a launcher set; None: those of this process.

    Raises:
        ConfigError: the machine has too few GPUs for its ranks, or lacks a GPU of ``devices``.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if config.devices or torch.cuda.is_available() else "cpu"
    is_one_device = config.num_ranks == 1 and not config.devices
    if name != "cuda" or is_one_device or not torch.cuda.is_available():
        return choose_device(name)
    gpus = _usable_gpus(config)
    if config.executor_name == "external_launcher":
        place = _place_on_machine(gpus, os.environ if environment is None else environment)
    elif config.executor_name == "multiproc":
        place = rank
        _check_number(gpus, config.num_ranks)
    else:  # a single rank, or a rank of Ray, which sees only its own GPU
        place = 0
    return choose_device(f"cuda:{gpus[place]}")


def _usable_gpus(config: EngineConfig) -> Sequence[int]:
    """Return the CUDA indices of the GPUs that this machine's ranks may use, in order."""
    num_visible = torch.cuda.device_count()
    named = parse_devices(config.devices)
    missing = [index for index in named if index >= num_visible]
    if missing:
        raise ConfigError(f"devices: GPU {missing[0]} is named, but {num_visible} are visible here")
    return named or range(num_visible)


def _check_number(gpus: Sequence[int], num_ranks: int) -> None:
    if len(gpus) < num_ranks:
        raise ConfigError(
            f"devices: {num_ranks} ranks on one machine need {num_ranks} GPUs, got {len(gpus)}"
        )


def _place_on_machine(gpus: Sequence[int], environment: Mapping[str, str]) -> int:
    """Return the index in ``gpus`` of the GPU for a process that a launcher started."""
    name = next((name for name in _LOCAL_RANKS if environment.get(name)), None)
    # If no variable is set, the process is alone on its machine, such as a pod of a Kubernetes job.
    # If only one GPU is visible, SLURM gave each process a GPU of its own; `connect` raises an
    # error if two ranks have the same GPU.
    if name is None or torch.cuda.device_count() == 1:
        return 0
    if not environment[name].isdecimal():
        raise ConfigError(f"{name}: must be a number, got {environment[name]!r}")
    place = int(environment[name])
    if place >= len(gpus):
        raise ConfigError(f"devices: {name} is {place}, but only {len(gpus)} GPUs may be used here")
    return place
