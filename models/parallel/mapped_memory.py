"""Regions of memory that all ranks of a machine map: memory of GPUs (CUDA IPC), or of the host.

Refuses to know: what ranks write there.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MappingError(Exception):
    """The ranks cannot map each other's memory; all ranks raise this error."""


class MappedRegions:
    """One region of each rank, all mapped by this process; every rank makes one.

    Args:
        rank: this rank.
        size: number of ranks.
        num_bytes: size of a region.
        device: this rank's device, where its own region is allocated.
        store: rendezvous store of these ranks (``torch.distributed.Store``).

    Attributes:
        own: bytes of this rank's region, 0 at first.
        addresses: address of each rank's region in this process.

    Raises:
        MappingError: the ranks are on several machines, or a rank cannot map a region.
    """

    def __init__(
        self, rank: int, size: int, num_bytes: int, device: torch.device, store: Any
    ) -> None:
        make = _GpuRegion if device.type == "cuda" else _HostRegion
        own = make(num_bytes, device)
        store.set(f"region-{rank}", msgspec.msgpack.encode((_machine(), own.handle)))
        others: list[Any] = []
        self.addresses: list[int] = []
        problem = ""
        for other in range(size):
            machine, handle = msgspec.msgpack.decode(store.get(f"region-{other}"))
            if machine != _machine():
                problem = f"ranks {rank} and {other} are on different machines"
                break
            try:
                if other != rank:
                    others.append(own.open(handle))
                self.addresses.append(own.address if other == rank else others[-1].address)
            except (RuntimeError, OSError) as error:
                reason = str(error).partition("\n")[0]
                problem = f"rank {rank} cannot map memory of rank {other}: {reason}"
                break
        agree(store, "mapped", rank, size, problem)
        own.end_sharing()
        self.own: Tensor = own.tensor
        self._held = own, others


def agree(store: Any, name: str, rank: int, size: int, problem: str) -> None:
    """Tell all ranks this rank's problem, or an empty text; raise MappingError if one has any."""
    store.set(f"{name}-{rank}", problem or "none")
    for other in range(size):
        found = store.get(f"{name}-{other}").decode()
        if found != "none":
            raise MappingError(found)


def _machine() -> str:
    """Return an id of this machine's kernel, which changes when the machine starts."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""


class _GpuRegion:
    """Memory of this process on a GPU, which other processes map by CUDA IPC."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # others may write as soon as they have the handle
        self.address = self.tensor.data_ptr()
        # torch.multiprocessing sends tensors by this function, too.
        storage: Any = self.tensor.untyped_storage()
        self.handle = list(storage._share_cuda_())[1:]

    def open(self, handle: list[Any]) -> _OpenedRegion:
        """Map another rank's region on this rank's GPU, which gets access to the other GPU."""
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *handle)
        return _OpenedRegion(storage.data_ptr(), storage)

    def end_sharing(self) -> None:
        """Do nothing: all ranks have the handle."""


class _HostRegion:
    """Memory of the host, for tests of the kernels without a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._descriptor = os.memfd_create("baton-region")
        os.ftruncate(self._descriptor, num_bytes)
        self.handle = f"/proc/{os.getpid()}/fd/{self._descriptor}", num_bytes
        opened = self.open(self.handle)
        self.address, self.tensor = opened.address, opened.held

    def open(self, handle: tuple[str, int]) -> _OpenedRegion:
        """Map another rank's region."""
        path, num_bytes = handle
        descriptor = os.open(path, os.O_RDWR)
        memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        os.close(descriptor)
        return _OpenedRegion(memory.data_ptr(), memory)

    def end_sharing(self) -> None:
        """Close the file, which all ranks have mapped."""
        os.close(self._descriptor)


class _OpenedRegion:
    """A region as this process maps it; ``held`` keeps the mapping."""

    def __init__(self, address: int, held: Any) -> None:
        self.address, self.held = address, held
