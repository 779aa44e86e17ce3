"""TorchGroup: ranks that communicate by ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

Refuses to know: how ranks are started, what is computed.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from models.parallel.group import SINGLE_RANK, CollectiveError, Ranks
from models.parallel.shared_group import share_memory

# Typed as Any: these functions of torch are documented, but lack type annotations.
dist: Any = torch.distributed

_TIMEOUT = timedelta(seconds=60)
_START_TIMEOUT = timedelta(seconds=600)
_TCP = "tcp://"


class TorchGroup:
    """A ``Collective`` on one host.

    Args:
        rank: this process's rank.
        size: size of the group.
        meeting: rendezvous of the ranks: a folder, or ``tcp://HOST:PORT``, the leader's
            ``TCPStore``.
        name: the group's name, unique at this rendezvous.
        device: the tensors' device.
    """

    def __init__(self, rank: int, size: int, meeting: str, name: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        store, address = _meet(meeting, name, size)
        self._sending: dict[int, tuple[Any, Tensor]] = {}
        self._backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            # By default, gloo finds an interface by the host's name, which may not resolve.
            device_options = dist.ProcessGroupGloo._Options()
            device_options._timeout = _TIMEOUT
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            where = {"interface": interface} if interface else {"hostname": address}
            device_options._devices = [dist.ProcessGroupGloo.create_device(**where)]
            self._backend = dist.ProcessGroupGloo(store, rank, size, device_options)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Implement ``Collective.all_reduce``."""
        _refuse_tapes(tensor)
        self._wait(self._backend.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Implement ``Collective.all_gather``."""
        _refuse_tapes(tensor)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._wait(self._backend.allgather([list(gathered)], [tensor]))
        return gathered

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Implement ``Collective.broadcast``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._backend.broadcast([tensor], options))
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """Implement ``Collective.send``; waits until earlier tensors to that rank are sent."""
        before = self._sending.pop(to, None)
        if before is not None:
            self._wait(before[0])
        self._sending[to] = self._backend.send([tensor], to, 0), tensor

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Implement ``Collective.receive``."""
        self._wait(self._backend.recv([tensor], source, 0))
        return tensor

    def abort(self) -> None:
        """Implement ``Collective.abort``."""
        self._backend.abort()

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"another rank is gone: {error}") from error


def _meet(meeting: str, name: str, size: int) -> tuple[Any, str]:
    """Return a group's store, and this host's address as other ranks see it."""
    if not meeting.startswith(_TCP):
        return dist.FileStore(f"{meeting}/{name}", size), "127.0.0.1"
    host, _, port = meeting.removeprefix(_TCP).rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
    return dist.PrefixStore(name, store), own_address(host, int(port))


def host_store(host: str) -> tuple[Any, int]:
    """Open a rendezvous store on this machine; return the store (keep a reference) and its port."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    return store, store.port


def launchers_store(rank: int, size: int, host: str, port: int) -> Any:
    """Return the store that a launcher's processes share; torchrun has one already.

    Source: the ``env://`` rendezvous of ``torch.distributed``.
    """
    url = f"env://{host}:{port}?rank={rank}&world_size={size}"
    store, _, _ = next(dist.rendezvous(url))
    store.set_timeout(_START_TIMEOUT)
    return store


def own_address(host: str, port: int) -> str:
    """Return this host's address on the route to another host, without sending anything."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def connect(
    rank: int,
    num_ranks: int,
    stage_size: int,
    meeting: str,
    device: torch.device,
    shared: int | None = None,
) -> Ranks:
    """Connect the ranks of a model; every rank calls this.

    Args:
        rank: rank of this process.
        num_ranks: number of ranks in all stages together.
        stage_size: ranks of one stage.
        meeting: rendezvous of these ranks, see ``TorchGroup``.
        device: the tensors' device.
        shared: descriptor of memory that ranks of this machine share (`open_shared`); on GPUs, sums
            do not use it.
    """
    if device.type != "cpu":
        shared = None
    everyone = TorchGroup(rank, num_ranks, meeting, "everyone", device)
    if stage_size == num_ranks:
        group = share_memory(everyone, shared, 0)
        return Ranks(group, group)
    if stage_size == 1:
        return Ranks(everyone, SINGLE_RANK)
    stage, place = divmod(rank, stage_size)
    of_stage = TorchGroup(place, stage_size, meeting, f"stage-{stage}", device)
    return Ranks(everyone, share_memory(of_stage, shared, stage))


def _refuse_tapes(tensor: Tensor) -> None:
    """Mark the tape being recorded, if any, as impossible to replay."""
    tensor[:0].zero_()
