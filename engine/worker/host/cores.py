"""Cores of this process: how many threads compute, and on which cores they may run.

Refuses to know: the computation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from baton.api.errors import ConfigError
from baton.engine_config import NUMA, EngineConfig, parse_cpu_list
from baton.kv.manifest import shard


def use_cores(config: EngineConfig, rank: int = 0, num_ranks: int = 1) -> None:
    """Pin this thread to a rank's cores, and set the number of threads that compute.

    Args:
        config: options of all ranks together.
        rank: this process's rank; ranks on one machine divide the cores and the threads.
        num_ranks: number of ranks.

    Threads that this thread starts later are pinned to these cores, too. Raises ConfigError if this
    process may not run on one of the cores.
    """
    if config.cpu_list == NUMA:
        cores = cores_by_numa(numa_nodes(), rank, num_ranks)
    else:
        cores = parse_cpu_list(config.cpu_list)
        if num_ranks > 1 and cores:
            cores = _share(cores, rank, num_ranks)
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, AttributeError) as error:
            raise ConfigError(f"cpu_list: {config.cpu_list!r} cannot be used: {error}") from error
        if os.sched_getaffinity(0) != cores:  # the kernel ignores cores that are missing
            allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            raise ConfigError(f"cpu_list: must be among {allowed}, got {config.cpu_list!r}")
    num_threads = config.num_threads or len(cores)
    if num_ranks > 1 and (config.num_threads or not cores):
        num_threads = max((config.num_threads or torch.get_num_threads()) // num_ranks, 1)
    if num_threads:
        torch.set_num_threads(num_threads)


def allowed_cores() -> frozenset[int]:
    """Return the cores on which this thread may run; empty: the system does not say."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def cores_of_rank(config: EngineConfig, rank: int) -> frozenset[int]:
    """Return a rank's share of the allowed cores.

    Ranks wait for each other, so two ranks must not share a core. The result is empty if there are
    fewer cores than ranks, or if an option names the cores.
    """
    allowed = allowed_cores()
    if config.cpu_list or len(allowed) < config.num_ranks:
        return frozenset()
    return _share(allowed, rank, config.num_ranks)


def bind(cores: frozenset[int]) -> None:
    """Pin this thread, and threads that it starts later, to these cores; empty: change nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Pin this thread, and threads started meanwhile, to these cores inside this context."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone inside this context; other threads are unaffected."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores_by_numa(nodes: Sequence[frozenset[int]], rank: int, num_ranks: int) -> frozenset[int]:
    """Return a rank's cores: those of one NUMA node, or of several if ranks are few.

    Ranks on the same NUMA node divide its cores, if there are enough. The result is empty if the
    machine has no NUMA nodes.
    """
    if not nodes:
        return frozenset()
    first, end = shard(len(nodes), rank, num_ranks)
    cores = frozenset[int]().union(*nodes[first:end])
    same = [r for r in range(num_ranks) if shard(len(nodes), r, num_ranks)[0] == first]
    return _share(cores, same.index(rank), len(same)) if len(same) <= len(cores) else cores


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> list[frozenset[int]]:
    """Return the cores that this process may use, one set per NUMA node."""
    allowed = os.sched_getaffinity(0)
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    found = [parse_cpu_list(path.read_text(encoding="ascii").strip()) & allowed for path in files]
    return [cores for cores in found if cores]


def _share(cores: frozenset[int], rank: int, num_ranks: int) -> frozenset[int]:
    in_order = sorted(cores)
    return frozenset(in_order[slice(*shard(len(in_order), rank, num_ranks))])
