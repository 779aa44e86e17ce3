"""The cores of this process: how many threads compute, and where they may run.

Refuses to know: what is computed.
"""

from __future__ import annotations

import os

import torch

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig, parse_cpu_list
from baton.kv_manifest import shard


def use_cores(config: EngineConfig, rank: int = 0, num_ranks: int = 1) -> None:
    """Pin this thread, and those it starts from now on, and set the number of threads.

    Args:
        config: of all ranks together.
        rank: this process's; ranks on one machine divide the cores and the threads.
        num_ranks: how many there are.

    Raises ConfigError when the machine does not let the process run on a wanted core.
    """
    cores = parse_cpu_list(config.cpu_list)
    if num_ranks > 1 and cores:
        in_order = sorted(cores)
        cores = frozenset(in_order[slice(*shard(len(in_order), rank, num_ranks))])
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, AttributeError) as error:
            raise ConfigError(f"cpu_list: {config.cpu_list!r} cannot be had: {error}") from error
        if os.sched_getaffinity(0) != cores:  # the kernel drops cores that are not there
            allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            raise ConfigError(f"cpu_list: must be among {allowed}, got {config.cpu_list!r}")
    num_threads = config.num_threads or len(cores)
    if num_ranks > 1:
        each = config.num_threads or len(parse_cpu_list(config.cpu_list)) or torch.get_num_threads()
        num_threads = max(each // num_ranks, 1)
    if num_threads:
        torch.set_num_threads(num_threads)
