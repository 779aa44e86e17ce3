"""SharedGroup: ranks on one machine that sum tensors in shared memory (kernels/csrc/ranks.c).

The memory is a file without a name that each rank's process inherits, so no file is left behind.
All other operations go through another ``Collective``. Refuses to know: how ranks start.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch
from torch import Tensor

from baton_kernels.dispatch import native_ops
from baton_kernels.native.library import RankGroup
from models.parallel.group import Collective, CollectiveError

# Bytes of a slot in shared memory. Each rank has two slots, and writes its tensor into them piece
# by piece; a piece has at most this size.
SLOT_BYTES = 2**20
_LINE_BYTES = 64
_TIMEOUT_S = 60
# Number of times that a rank checks another rank's flag before it yields its core: about 20 us.
_SPINS = 1000


def group_bytes(size: int) -> int:
    """Return how many bytes a group of ``size`` ranks shares; unused pages take no memory."""
    needed = (1 + size) * _LINE_BYTES + 2 * size * SLOT_BYTES
    return -(-needed // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def open_shared(num_groups: int, size: int) -> int | None:
    """Make shared memory for several groups of ``size`` ranks; return its file descriptor.

    Returns None if the system cannot make such memory, or a group has only one rank.
    """
    if not hasattr(os, "memfd_create") or size == 1:
        return None
    descriptor = os.memfd_create("baton-ranks")
    os.ftruncate(descriptor, num_groups * group_bytes(size))
    return descriptor


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
        num_bytes = group_bytes(self.size)
        self._memory = mmap.mmap(descriptor, num_bytes, offset=index * num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        has_cores = (os.cpu_count() or 1) >= self.size
        spins = _SPINS if has_cores else 0
        self._group = RankGroup(self.rank, self.size, SLOT_BYTES, spins, _TIMEOUT_S, address, 0)

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
        """Wait for a tensor of rank ``source``, write it into ``tensor``; return ``tensor``."""
        return self._others.receive(tensor, source)

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        ops = native_ops()
        if ops is not None:
            ops.abort_ranks(self._group)
        self._others.abort()

    def _collect(self, tensor: Tensor, gathered: Tensor | None = None) -> bool:
        ops = native_ops()
        if ops is None:
            return False
        try:
            return ops.collect(self._group, tensor, gathered)
        except ConnectionAbortedError as error:
            raise CollectiveError(str(error)) from error


def share_memory(group: Collective, descriptor: int | None, index: int) -> Collective:
    """Return a group that sums in shared memory if all ranks can map it, else ``group``."""
    if descriptor is None or group.size == 1:
        return group
    shared: SharedGroup | None = None
    with contextlib.suppress(OSError, ValueError):
        shared = SharedGroup(group, descriptor, index)
    can = torch.tensor([int(shared is not None and native_ops() is not None)])
    return shared if shared is not None and bool(group.all_gather(can).all()) else group
