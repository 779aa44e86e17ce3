"""HostGroup: ranks on GPUs that exchange tensors through the host's memory.

Two ranks on one GPU need this group, because NCCL refuses them. Refuses to know: how ranks start.
"""

from __future__ import annotations

from torch import Tensor

from models.parallel.group import Collective


class HostGroup:
    """A ``Collective`` of tensors on GPUs, which another group exchanges on the CPU.

    Args:
        others: a group of these ranks for tensors on the CPU.
    """

    def __init__(self, others: Collective) -> None:
        self.rank, self.size = others.rank, others.size
        self._others = others

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place; return ``tensor``."""
        return tensor.copy_(self._others.all_reduce(tensor.cpu()))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked: ``[size, ...]``."""
        return self._others.all_gather(tensor.cpu()).to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy the tensor of rank ``source`` into ``tensor`` on all ranks; return ``tensor``."""
        return tensor.copy_(self._others.broadcast(tensor.cpu(), source))

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending ``tensor`` to rank ``to``."""
        self._others.send(tensor.cpu(), to)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Wait for a tensor of rank ``source``, write it into ``tensor``; return ``tensor``."""
        return tensor.copy_(self._others.receive(tensor.cpu(), source))

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        self._others.abort()
