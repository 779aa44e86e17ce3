"""Tests of the KV connector with KV in GPU memory, for which a stand-in is used."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from baton.kv.block_key import BlockKey
from kvconnector.base import DEVICE_PORTIONS, HOST_PORTIONS, BlockPush, KVReservation
from kvconnector.block_digests import BlockDigests
from kvconnector.blocks import Slices
from kvconnector.ends import Receiver, Sender
from kvconnector.io import IoLoop
from kvconnector.layout import KVMemory
from kvconnector.peer_info import PeerInfo, host_identity
from kvconnector.protocol.actions import Action, Input, Turn, Write
from kvconnector.protocol.digests import Written
from kvconnector.protocol.peers import Peers
from kvconnector.protocol.seals import Channels
from kvconnector.protocol.transfer import Piece
from kvconnector.transports.in_memory import InMemoryTransport
from kvconnector.transports.nixl.transport import NixlTransport, _Peer
from kvconnector.transports.paths import (
    CUDA_IPC_PATH,
    PCIE_BYTES_PER_S,
    UNKNOWN_GPU_PATH,
    judge_path,
)
from kvconnector.transports.scratch import Scratch
from tests.fakes.engine.cuda import FakeCuda, OnDevice
from tests.fakes.handoff.kv_memories import PlainMemory, manifest, memory_of
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.waiting import wait_until

KEY = BlockKey(b"1" * 32)
WRITTEN = Written("r", 0, [0, 1], (0, 2), 0, [0, 1])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda(free_bytes=2**30)
    cuda.install(monkeypatch)
    return cuda


class Read(OnDevice):
    """Notes on which stream it is copied to the host."""

    device_of: FakeCuda
    streams: list[object]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        self.streams.append(self.device_of.stream)
        return self.as_subclass(torch.Tensor).clone()


def test_digests_do_not_wait_for_steps(cuda: FakeCuda) -> None:
    Read.device_of, Read.streams = cuda, []
    plain = torch.arange(4 * 2 * 8, dtype=torch.float32).view(4, 2, 8)
    on_device = BlockDigests(memory_of(plain.as_subclass(Read)))
    assert on_device.of([1, 3], WRITTEN, KEY) == BlockDigests(memory_of(plain)).of(
        [1, 3], WRITTEN, KEY
    )
    [own] = cuda.streams
    assert Read.streams == [own]
    assert (own.num_waits, cuda.main.num_waits) == (1, 0)


def test_self_tests_do_not_wait_for_steps(cuda: FakeCuda) -> None:
    scratch = Scratch("e", torch.zeros(1, 1).as_subclass(OnDevice), 64)
    scratch.lend(0, "p")
    scratch.memory[1].copy_(scratch.memory[0])
    assert scratch.digest_of(0) == scratch.digest
    [own] = cuda.streams
    assert own.num_waits == 3  # made, cleared, read
    assert cuda.main.num_waits == 0


# ---------------------------------------------------------------- how much at once


class HeldWrites(InMemoryTransport):
    """Writes that end when they are told to."""

    def __init__(self, engine_id: str, memory: KVMemory, *, on_device: bool) -> None:
        super().__init__(engine_id, memory)
        if on_device:
            self.scratch.memory = self.scratch.memory.as_subclass(OnDevice)
        self.written_blocks: list[int] = []
        self.is_held = True

    def write(self, *arguments: Any, **options: Any) -> Any:
        self.written_blocks.append(len(arguments[1]))
        return SimpleNamespace(is_done=lambda: not self.is_held)


@pytest.mark.parametrize(("on_device", "most_mib"), [(False, 32), (True, 256)])
def test_so_much_is_in_flight_as_the_memory_is_quick(on_device: bool, most_mib: int) -> None:
    portions = DEVICE_PORTIONS if on_device else HOST_PORTIONS
    mib = 2**20
    memory = PlainMemory(torch.zeros(512, 1, 1, 1), manifest(1, 1, mib // 4))  # so it says
    transport = HeldWrites(f"p-{on_device}", memory, on_device=on_device)
    clock = VirtualClock()
    sender = Sender(transport, lambda: None, lambda error: None, clock)
    target = InMemoryTransport(f"d-{on_device}", memory)
    receiver = Receiver(target, lambda: None, lambda error: None, clock)
    d = receiver.peer_info.engine_id
    sender.connect(receiver.peer_info)
    receiver.connect(sender.peer_info)

    def go_on() -> None:
        sender.loop.round()
        receiver.loop.round()
        clock.advance(0.001)

    for _ in range(200):
        go_on()
    sender.machine.peers[d].bandwidth_bytes_per_s = 1e12  # too low because of the clock's steps
    sender.start("r", 0, d, num_tokens=1, num_blocks=512)
    sender.push(
        BlockPush(request_id="r", epoch=0, first_block=0, block_ids=tuple(range(512)), num_tokens=1)
    )
    go_on()
    receiver.grant(
        KVReservation(
            request_id="r",
            epoch=0,
            engine_id=sender.peer_info.engine_id,
            block_ids=tuple(range(512)),
        )
    )
    for _ in range(5):
        go_on()
    assert set(transport.written_blocks) == {portions.write_bytes // mib}
    assert sum(transport.written_blocks) == most_mib
    transport.is_held = False
    for _ in range(64):
        go_on()
    assert sum(transport.written_blocks) == 512
    sender.close()
    receiver.close()


class Waits(threading.Event):
    """Counter of sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        return super().wait(timeout)


class AlwaysMoving:
    """Has something written, and waits for its end."""

    is_expecting = False
    is_moving = True

    def __init__(self, own: PeerInfo) -> None:
        self.peers = Peers(Turn(), own, greets=False)
        piece = Piece((0,), (0,))
        self._actions: list[Action] = [Write("d", ("r", 0), piece, [0])]

    def handle_input(self, item: Input, now: float) -> list[Action]:
        return []

    def tick(self, now: float) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


@pytest.mark.parametrize("on_device", [False, True])
def test_nobody_sleeps_while_a_gpus_writes_fly(on_device: bool) -> None:
    transport = HeldWrites(
        f"hurry-{on_device}", memory_of(torch.zeros(1, 1, 1)), on_device=on_device
    )
    loop = IoLoop(
        transport,
        AlwaysMoving(transport.peer_info),
        Channels("hurry"),
        on_event=lambda: None,
        on_death=lambda error: None,
    )
    waits = loop._wake = Waits()
    loop.start()
    wait_until(lambda: loop.rounds.num_ended >= 50)
    assert (waits.count == 0) is on_device
    loop.close()


# ---------------------------------------------------------------- which path


@pytest.mark.parametrize("host", [host_identity(), "another"])
def test_nixl_does_not_name_a_path_from_a_gpu_by_itself(host: str) -> None:
    transport = NixlTransport.__new__(NixlTransport)
    transport._kv_cache = torch.zeros(1).as_subclass(OnDevice)
    info = msgspec.structs.replace(
        InMemoryTransport(f"path-{host}", memory_of(torch.zeros(1, 1, 1))).peer_info, host=host
    )
    peer = _Peer(info, Slices(info.manifest, info.manifest))
    assert transport._path(peer) == UNKNOWN_GPU_PATH


@pytest.mark.parametrize(
    ("path", "on_this_host", "bandwidth", "expected"),
    [
        (UNKNOWN_GPU_PATH, True, 2 * PCIE_BYTES_PER_S, CUDA_IPC_PATH),
        (UNKNOWN_GPU_PATH, True, PCIE_BYTES_PER_S, UNKNOWN_GPU_PATH),
        (UNKNOWN_GPU_PATH, False, 2 * PCIE_BYTES_PER_S, UNKNOWN_GPU_PATH),
        ("nixl/ucx tcp", True, 2 * PCIE_BYTES_PER_S, "nixl/ucx tcp"),
    ],
)
def test_only_a_bandwidth_that_nothing_else_has_names_a_path(
    path: str, on_this_host: bool, bandwidth: float, expected: str
) -> None:
    found = judge_path(path, on_this_host=on_this_host, bandwidth_bytes_per_s=bandwidth)
    assert found == expected
