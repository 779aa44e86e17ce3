"""MappedGroup: ranks of one machine that sum and gather tensors in each other's GPU memory.

The kernels are `baton_kernels.triton.ranks.collectives`. All other operations go through another
``Collective``. Refuses to know: how ranks start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.api.errors import ConfigError
from baton_kernels.triton.ranks.measured import (
    NCCL,
    TWO_PASSES,
    MeasuredSum,
    measured_sums,
    read_table,
    way_of,
)
from models.parallel.group import Collective, CollectiveError
from models.parallel.mapped_memory import MappedRegions, MappingError, agree

if TYPE_CHECKING:
    from baton_kernels.triton.ranks.collectives import RankKernels, RegionShape

logger = logging.getLogger(__name__)

# A round of waiting takes a GPU about a microsecond, so a rank waits for about a minute.
MAX_SPINS = 60_000_000


class MappedGroup:
    """Ranks of one machine that map each other's memory; a ``Collective``.

    Every rank makes one, and the ranks try the kernels.

    Args:
        others: another group of these ranks, for all other operations.
        device: this rank's device.
        store: rendezvous store of these ranks.
        rows: measured sums of these GPUs.
        with_nccl: whether ``others`` sum tensors of sizes at which they were measured faster, and
            gather.
        shape: sizes of the regions; None: the default sizes.
        max_spins: how long a rank waits, in rounds.

    Raises:
        MappingError: the ranks cannot map each other's memory, or the kernels compute wrong sums.
    """

    def __init__(
        self,
        others: Collective,
        device: torch.device,
        store: Any,
        rows: Sequence[MeasuredSum] = (),
        *,
        with_nccl: bool = False,
        shape: RegionShape | None = None,
        max_spins: int = MAX_SPINS,
    ) -> None:
        from baton_kernels.triton.ranks import collectives  # a CPU needs no Triton

        self.rank, self.size = others.rank, others.size
        self._others, self._rows, self._with_nccl = others, rows, with_nccl
        self._summed = collectives.SUMMED
        shape = shape or collectives.RegionShape(self.size)
        self._regions = MappedRegions(self.rank, self.size, shape.num_bytes, device, store)
        # The host must be able to stop a kernel while the GPU computes nothing else.
        stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._stop = stop.numpy()
        self._kernels = collectives.RankKernels(
            self.rank, shape, self._regions.addresses, stop, device, max_spins
        )
        num_elements = 2 * self.size * shape.block + 3  # several programs
        is_right = _try_out(self._kernels, num_elements, self.rank, self.size, device)
        problem = "" if is_right and not self._stop[0] else f"rank {self.rank} got a wrong sum"
        agree(store, "tried", self.rank, self.size, problem)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place; return ``tensor``."""
        if tensor.dtype not in self._summed or not tensor.numel():
            return self._others.all_reduce(tensor)
        way = way_of(tensor.nbytes, self._rows, self._with_nccl)
        if way == NCCL:
            return self._others.all_reduce(tensor)
        self._begin(tensor)
        part = tensor.contiguous()
        self._kernels.sum(part, in_two_passes=way == TWO_PASSES)
        self.raise_if_stopped()
        return tensor if part is tensor else tensor.copy_(part)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked: ``[size, ...]``."""
        if self._with_nccl or not tensor.numel():
            return self._others.all_gather(tensor)
        self._begin(tensor)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._kernels.gather(tensor.contiguous(), gathered)
        self.raise_if_stopped()
        return gathered

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
        self._stop[0] = 1
        self._others.abort()

    def raise_if_stopped(self) -> None:
        """Raise CollectiveError if a kernel of this rank was stopped, so its result is wrong."""
        if self._stop[0]:
            raise CollectiveError("another rank is gone, or did not respond in time")

    def _begin(self, tensor: Tensor) -> None:
        self.raise_if_stopped()
        if tensor.device.type == "cpu":
            tensor[:0].zero_()  # a tape that is being recorded fails: a replay would not sum


def _try_out(
    kernels: RankKernels, num_elements: int, rank: int, size: int, device: torch.device
) -> bool:
    """Return whether a sum in one pass, a sum in two passes and a gather are right."""
    own = torch.arange(num_elements, dtype=torch.float32, device=device)
    ranks = torch.arange(size, dtype=torch.float32, device=device)
    gathered = own.new_empty(size, num_elements)
    kernels.gather(own + rank, gathered)
    are_right = [torch.equal(gathered, own + ranks[:, None])]
    for in_two_passes in (False, True):
        found = own + rank
        kernels.sum(found, in_two_passes=in_two_passes)
        are_right.append(torch.equal(found, own * size + ranks.sum()))
    return all(are_right)


def _check_triton(device: torch.device) -> None:
    """Raise ConfigError if the kernels cannot run; on a CPU, only Triton's interpreter can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"rank_sums: own is for GPUs, but the ranks are on {device.type}")
    if find_spec("triton") is None:
        raise ConfigError("rank_sums: own needs the package triton; use nccl")


def _have_all(rows: Sequence[MeasuredSum], group: Collective, store: Any) -> bool:
    """Return whether all ranks have measured sums, as they have if their GPUs are equal."""
    name = rows[0].gpu if rows else "none"
    store.set(f"measured-{group.rank}", name)
    return all(store.get(f"measured-{rank}").decode() == name for rank in range(group.size))


def map_memory(
    group: Collective, rank_sums: str, device: torch.device, store: Any
) -> MappedGroup | None:
    """Return a group that sums in mapped memory if the option asks for it, else None.

    Args:
        group: the ranks, on one machine or several.
        rank_sums: ``own``, ``nccl``, or ``auto``: as was measured faster on these GPUs.
        device: this rank's device.
        store: rendezvous store of these ranks.

    Raises:
        ConfigError: ``own`` is not possible here.
    """
    if group.size == 1 or rank_sums == NCCL:
        return None
    is_own = rank_sums == "own"
    rows = measured_sums(device, group.size)
    if is_own:
        _check_triton(device)
    if read_table() and not _have_all(rows, group, store):
        rows = ()  # ranks with different GPUs
    if not is_own and not rows:
        return None
    try:
        mapped = MappedGroup(group, device, store, rows, with_nccl=not is_own)
    except MappingError as error:
        if is_own:
            raise ConfigError(f"rank_sums: own is not possible, {error}; use nccl") from error
        logger.warning("sums of ranks by NCCL alone: %s", error)
        return None
    ways = "own kernels" if is_own else f"own kernels or NCCL, by {len(rows)} measured sizes"
    logger.info("sums of ranks by %s", ways)
    return mapped
