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

from baton.api.errors import ConfigError
from models.parallel.group import SINGLE_RANK, Collective, CollectiveError, Ranks
from models.parallel.host_group import HostGroup
from models.parallel.mapped_group import map_memory
from models.parallel.shared_group import share_memory, share_point_to_point

# The type is Any, because these functions of torch are documented, but lack type annotations.
dist: Any = torch.distributed

_TIMEOUT = timedelta(seconds=60)
_START_TIMEOUT = timedelta(seconds=600)
_TCP = "tcp://"


class TorchGroup:
    """A ``Collective`` over ``torch.distributed``.

    Args:
        rank: this process's rank.
        size: size of the group.
        meeting: where the ranks find each other: a folder that all can read, or
            ``tcp://HOST:PORT``, the address of the leader's ``TCPStore``.
        name: the group's name, unique among the groups that meet there.
        device: device of the tensors to exchange.
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
            # By default, gloo finds a network interface by the host's name, which may not resolve.
            device_options = dist.ProcessGroupGloo._Options()
            device_options._timeout = _TIMEOUT
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            where = {"interface": interface} if interface else {"hostname": address}
            device_options._devices = [dist.ProcessGroupGloo.create_device(**where)]
            self._backend = dist.ProcessGroupGloo(store, rank, size, device_options)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place; return ``tensor``."""
        _refuse_tapes(tensor)
        self._wait(self._backend.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked: ``[size, ...]``."""
        _refuse_tapes(tensor)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._wait(self._backend.allgather([list(gathered)], [tensor]))
        return gathered

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy the tensor of rank ``source`` into ``tensor`` on all ranks; return ``tensor``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self._backend.broadcast([tensor], options))
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending ``tensor`` to rank ``to``, once the previous tensor is sent there."""
        before = self._sending.pop(to, None)
        if before is not None:
            self._wait(before[0])
        self._sending[to] = self._backend.send([tensor], to, 0), tensor

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Wait for a tensor of rank ``source``, write it into ``tensor``; return ``tensor``."""
        self._wait(self._backend.recv([tensor], source, 0))
        return tensor

    def abort(self) -> None:
        """Make all calls of all ranks fail from now on; safe from any thread."""
        self._backend.abort()

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"another rank is gone: {error}") from error


def _meet(meeting: str, name: str, size: int) -> tuple[Any, str]:
    """Open a group's store for the rendezvous; return the store, and this host's address."""
    if not meeting.startswith(_TCP):
        return dist.FileStore(f"{meeting}/{name}", size), "127.0.0.1"
    host, _, port = meeting.removeprefix(_TCP).rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
    return dist.PrefixStore(name, store), own_address(host, int(port))


def open_store(meeting: str, name: str, size: int) -> Any:
    """Open the store in which the ranks of a group exchange what they need before they start."""
    store, _ = _meet(meeting, name, size)
    store.set_timeout(_START_TIMEOUT)
    return store


def host_store(host: str) -> tuple[Any, int]:
    """Open a rendezvous store on this machine; return the store and its port.

    The store lives as long as the caller keeps a reference.
    """
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    return store, store.port


def launchers_store(rank: int, size: int, host: str, port: int) -> Any:
    """Return the store that all processes of a launcher, such as torchrun, share.

    As in the ``env://`` rendezvous of ``torch.distributed``, rank 0 opens the store if the launcher
    has not.
    """
    url = f"env://{host}:{port}?rank={rank}&world_size={size}"
    store, _, _ = next(dist.rendezvous(url))
    store.set_timeout(_START_TIMEOUT)
    return store


def own_address(host: str, port: int) -> str:
    """Return the address from which this host would reach another host; send nothing."""
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
    rank_sums: str = "auto",
) -> Ranks:
    """Connect the ranks of a model; every rank calls this.

    Args:
        rank: rank of this process.
        num_ranks: number of ranks in all stages together.
        stage_size: number of ranks of one stage.
        meeting: where these ranks find each other, as in ``TorchGroup``.
        device: this rank's device.
        shared: descriptor of memory that the ranks of this machine share (`open_shared`); ignored
            on GPUs.
        rank_sums: how GPUs compute sums: ``own``, ``nccl``, or ``auto`` (as measured).

    Raises:
        ConfigError: some ranks are on CPUs and others on GPUs, two ranks are on one GPU without
            ``own``, or ``own`` is not possible.
    """
    shares_gpu = _check_devices(rank, num_ranks, meeting, device, rank_sums)
    if device.type != "cpu":
        shared = None

    def make(place: int, size: int, name: str) -> Collective:
        if not shares_gpu:
            return TorchGroup(place, size, meeting, name, device)
        return HostGroup(TorchGroup(place, size, meeting, name, torch.device("cpu")))

    def make_fast(group: Collective, stage: int) -> Collective:
        store = open_store(meeting, f"mapped-{stage}", group.size)
        mapped = map_memory(group, rank_sums, device, store)
        return share_memory(group, shared, stage) if mapped is None else mapped

    everyone = make(rank, num_ranks, "everyone")
    if stage_size == num_ranks:
        group = make_fast(everyone, 0)
        return Ranks(group, group)
    point_to_point = share_point_to_point(everyone, shared, num_ranks // stage_size)
    if stage_size == 1:
        return Ranks(everyone, SINGLE_RANK, point_to_point=point_to_point)
    stage, place = divmod(rank, stage_size)
    group = make_fast(make(place, stage_size, f"stage-{stage}"), stage)
    return Ranks(everyone, group, point_to_point=point_to_point)


def _check_devices(
    rank: int, num_ranks: int, meeting: str, device: torch.device, rank_sums: str
) -> bool:
    """Return whether two ranks have one GPU, as is possible only without NCCL.

    Raises ConfigError on every rank if the ranks' devices cannot form one group: CPUs (gloo) and
    GPUs (NCCL) cannot, and NCCL refuses two ranks on one GPU.
    """
    store, _ = _meet(meeting, "devices", num_ranks)
    store.set_timeout(_TIMEOUT)
    store.set(str(rank), _describe(device))
    names = [store.get(str(other)).decode() for other in range(num_ranks)]
    first_of: dict[str, int] = {}
    for other, name in enumerate(names):
        if name.split()[0] != names[0].split()[0]:
            raise ConfigError(f"device: rank 0 is on {names[0]}, but rank {other} on {name}")
        is_second = device.type == "cuda" and first_of.setdefault(name, other) != other
        if is_second and rank_sums != "own":
            raise ConfigError(
                f"devices: ranks {first_of[name]} and {other} are both on {name}; "
                "each rank needs a GPU of its own"
            )
    return device.type == "cuda" and len(first_of) < num_ranks


def _describe(device: torch.device) -> str:
    """Return ``cpu``, or ``GPU`` with the GPU's unique id."""
    if device.type == "cpu":
        return "cpu"
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


def _refuse_tapes(tensor: Tensor) -> None:
    """Make a tape that is being recorded fail, because a replay would not communicate."""
    tensor[:0].zero_()
