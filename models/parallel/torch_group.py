"""TorchGroup: ranks that speak through ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

Refuses to know: how ranks are started, what is computed.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from models.parallel.group import SINGLE_RANK, Collective, CollectiveError, Ranks

# Typed as anything: what is named here has no types, though it is documented.
dist: Any = torch.distributed

_TIMEOUT = timedelta(seconds=60)


class TorchGroup:
    """A ``Collective`` on one host.

    Args:
        rank: of this process.
        size: of the group.
        folder: shared by its ranks and nobody else; they find each other by files in it.
        name: of the group, among those of the folder.
        device: of the tensors.
    """

    def __init__(self, rank: int, size: int, folder: Path, name: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(folder / name), size)
        self._sending: dict[int, tuple[Any, Tensor]] = {}
        self._backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            # By a name that the host may not resolve, gloo would look for an interface.
            device_options = dist.ProcessGroupGloo._Options()
            device_options._timeout = _TIMEOUT
            device_options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._backend = dist.ProcessGroupGloo(store, rank, size, device_options)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``Collective``."""
        _refuse_tapes(tensor)
        self._wait(self._backend.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See ``Collective``."""
        _refuse_tapes(tensor)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._wait(self._backend.allgather([list(gathered)], [tensor]))
        return gathered

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """See ``Collective``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._backend.broadcast([tensor], options))
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """See ``Collective``; waits for what was sent there before."""
        before = self._sending.pop(to, None)
        if before is not None:
            self._wait(before[0])
        self._sending[to] = self._backend.send([tensor], to, 0), tensor

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """See ``Collective``."""
        self._wait(self._backend.recv([tensor], source, 0))
        return tensor

    def abort(self) -> None:
        """Do nothing: calls fail when the process at the other end of a connection is gone."""

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"another rank is gone: {error}") from error


def connect(
    rank: int, num_ranks: int, stage_size: int, folder: Path, device: torch.device
) -> Ranks:
    """Find the other ranks of a model, each of which does the same.

    Args:
        rank: of this process.
        num_ranks: of all stages.
        stage_size: ranks of one stage.
        folder: see ``TorchGroup``.
        device: of the tensors.
    """
    everyone = TorchGroup(rank, num_ranks, folder, "everyone", device)
    if stage_size == num_ranks:
        return Ranks(everyone, everyone)
    group: Collective = SINGLE_RANK
    if stage_size > 1:
        stage, place = divmod(rank, stage_size)
        group = TorchGroup(place, stage_size, folder, f"stage-{stage}", device)
    return Ranks(everyone, group)


def _refuse_tapes(tensor: Tensor) -> None:
    """Have a tape that is being recorded notice that it cannot run this again."""
    tensor[:0].zero_()
