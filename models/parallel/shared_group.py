"""SharedGroup and SharedPointToPoint: ranks on one machine that exchange tensors in shared memory.

A stage's ranks sum and gather tensors (SharedGroup), and a stage sends hidden states to the next
stage (SharedPointToPoint). Both are implemented in `kernels/csrc/ranks.c`. The memory is a file
without a name that each rank's process inherits, so no file is left behind. All other operations go
through another ``Collective``. Refuses to know: how ranks start.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from baton_kernels.dispatch import native_ops
from baton_kernels.native.library import RankGroup
from models.parallel.group import Collective, CollectiveError, PointToPoint

Shared = TypeVar("Shared")

# Bytes of a slot in shared memory. Each rank has several slots, and writes a tensor into them in
# pieces of at most this size.
SLOT_BYTES = 2**20
_SLOTS, RING_SLOTS = 2, 8  # slots of a rank for collectives, and in its ring
# A larger tensor does not go through the ring, because its sender would wait for the receiver.
LARGEST_IN_RING = SLOT_BYTES * RING_SLOTS // 2
_LINE_BYTES = 64
_TIMEOUT_S = 60
# Number of times that a rank checks another rank's flag before it yields its core: about 20 us.
_SPINS = 1000


def _num_bytes(size: int, num_flags: int, num_slots: int) -> int:
    """Return the size of the memory that ``size`` ranks share; unused pages take no memory."""
    needed = (1 + num_flags) * _LINE_BYTES + num_slots * size * SLOT_BYTES
    return -(-needed // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def group_bytes(size: int) -> int:
    """Return how many bytes a group of ``size`` ranks shares."""
    return _num_bytes(size, size, _SLOTS)


def point_to_point_bytes(size: int) -> int:
    """Return how many bytes the rings of ``size`` ranks, over all stages, take."""
    return _num_bytes(size, 2 * size, RING_SLOTS)


def open_shared(num_groups: int, size: int) -> int | None:
    """Make shared memory for several groups of ``size`` ranks; return its file descriptor.

    With several groups (the stages of a model), the memory of the rings follows the memory of the
    groups. Returns None if the system cannot make such memory, or there is only one rank.
    """
    num_ranks = num_groups * size
    if not hasattr(os, "memfd_create") or num_ranks == 1:
        return None
    descriptor = os.memfd_create("baton-ranks")
    point_to_point = point_to_point_bytes(num_ranks) if num_groups > 1 else 0
    os.ftruncate(descriptor, num_groups * group_bytes(size) + point_to_point)
    return descriptor


class _Memory:
    """A part of the shared memory, with the C struct that describes it."""

    def __init__(
        self, ranks: Collective, descriptor: int, offset: int, num_flags: int, num_slots: int
    ) -> None:
        size = ranks.size
        self._memory = mmap.mmap(descriptor, _num_bytes(size, num_flags, num_slots), offset=offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        has_cores = (os.cpu_count() or 1) >= size
        spins = _SPINS if has_cores else 0
        numbers = (ranks.rank, size, num_flags, num_slots, SLOT_BYTES, spins, _TIMEOUT_S)
        self.group = RankGroup(*numbers, address, 0, 0)

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        ops = native_ops()
        if ops is not None:
            ops.abort_ranks(self.group)


class SharedGroup:
    """Ranks of one machine that sum tensors in shared memory; a ``Collective``.

    Args:
        others: another group of these ranks, for all other operations.
        descriptor: file descriptor from `open_shared`.
        index: index of this group among the groups that share this memory.
    """

    def __init__(self, others: Collective, descriptor: int, index: int) -> None:
        self.rank, self.size = others.rank, others.size
        self._others = others
        offset = index * group_bytes(self.size)
        self._memory = _Memory(others, descriptor, offset, self.size, _SLOTS)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place; return ``tensor``."""
        return tensor if self._collect(tensor) else self._others.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked: ``[size, ...]``."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        return gathered if self._collect(tensor, gathered) else self._others.all_gather(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy the tensor of rank ``source`` into ``tensor`` on all ranks; return ``tensor``."""
        return self._others.broadcast(tensor, source)

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending ``tensor`` to rank ``to``."""
        self._others.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Wait for a tensor of rank ``source``; write it into ``tensor``, and return ``tensor``."""
        return self._others.receive(tensor, source)

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        self._memory.abort()
        self._others.abort()

    def _collect(self, tensor: Tensor, gathered: Tensor | None = None) -> bool:
        ops = native_ops()
        if ops is None:
            return False
        with _as_collective_error():
            return ops.collect(self._memory.group, tensor, gathered)


class SharedPointToPoint:
    """Sends hidden states between the stages of a model on one machine, in shared memory.

    Each rank sends to at most one other rank, and receives from at most one other rank.

    Args:
        others: group of all ranks; sends tensors that are too large for a ring.
        descriptor: file descriptor from `open_shared`.
        num_stages: number of stages that share these ranks.
    """

    def __init__(self, others: Collective, descriptor: int, num_stages: int) -> None:
        self._others = others
        offset = num_stages * group_bytes(others.size // num_stages)
        self._memory = _Memory(others, descriptor, offset, 2 * others.size, RING_SLOTS)

    def send(self, tensor: Tensor, to: int) -> None:
        """Copy ``tensor`` into this rank's ring for rank ``to``."""
        ops = native_ops()
        if ops is None or tensor.nbytes > LARGEST_IN_RING:
            self._others.send(tensor, to)
            return
        with _as_collective_error():
            ops.send(self._memory.group, tensor.contiguous())

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Wait for a tensor of rank ``source``; write it into ``tensor``, and return ``tensor``."""
        ops = native_ops()
        if ops is None or tensor.nbytes > LARGEST_IN_RING:
            return self._others.receive(tensor, source)
        assert tensor.is_contiguous(), "a tensor is received into one range of memory"
        with _as_collective_error():
            ops.receive(self._memory.group, tensor, source)
        return tensor

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        self._memory.abort()
        self._others.abort()


@contextlib.contextmanager
def _as_collective_error() -> Iterator[None]:
    try:
        yield
    except ConnectionAbortedError as error:
        raise CollectiveError(str(error)) from error


def share_memory(group: Collective, descriptor: int | None, index: int) -> Collective:
    """Return a group that sums in shared memory if all ranks can map it, else ``group``."""
    if descriptor is None or group.size == 1:
        return group
    return _if_all_can(group, lambda: SharedGroup(group, descriptor, index)) or group


def share_point_to_point(
    everyone: Collective, descriptor: int | None, num_stages: int
) -> PointToPoint | None:
    """Return a `SharedPointToPoint` if all ranks can map the shared memory, else None."""
    if descriptor is None or num_stages == 1:
        return None
    return _if_all_can(everyone, lambda: SharedPointToPoint(everyone, descriptor, num_stages))


def _if_all_can(group: Collective, make: Callable[[], Shared]) -> Shared | None:
    """Return the result of ``make`` if ``make`` succeeds on all ranks, else None."""
    shared: Shared | None = None
    with contextlib.suppress(OSError, ValueError):
        shared = make()
    can = torch.tensor([int(shared is not None and native_ops() is not None)])
    return shared if bool(group.all_gather(can).all()) else None
