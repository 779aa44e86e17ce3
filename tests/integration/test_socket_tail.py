"""A sender that is killed in the middle of a write over TCP: its last bytes, and when they end."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from kvconnector.base import TransferEventKind
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess, start_time
from kvconnector.transports.nixl.transport import NixlTransport
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.unsealed import with_key
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(120)]
SHAPE = (128, 4, 2, 4, 64, 64)  # 64 MiB in blocks of 512 KiB
# Posts all blocks in one write; once asked, says that it has sent all that the sockets take.
SENDER = f"""
import base64, os, sys, threading, time, torch
from kvconnector.transports.nixl.transport import NixlTransport
from kvconnector.peer_info import PeerInfo
from tests.fakes.handoff.kv_memories import memory_of
transport = NixlTransport(f"p-{{os.getpid()}}", memory_of(torch.ones({SHAPE})))
print(base64.b64encode(transport.peer_info.encode()).decode(), flush=True)
peer = PeerInfo.decode(base64.b64decode(sys.stdin.readline()))
transport.connect(peer)
blocks = range({SHAPE[0]})
write = transport.write(peer.engine_id, blocks, blocks)
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
num_polls = 0
while not write.is_done():
    time.sleep(0.0001)
    num_polls += asked.is_set()
    if num_polls == 100:
        print("full", flush=True)
"""


class StandsStill(NixlTransport):
    """Reads no more, from when the first bytes have come until it is told to go on."""

    def __init__(self, engine_id: str, kv_cache: torch.Tensor) -> None:
        super().__init__(engine_id, memory_of(kv_cache))
        self._probes = kv_cache.view(-1)[::1024]
        self.stands = threading.Event()
        self.go_on = threading.Event()

    @property
    def num_written(self) -> int:
        """Return the number of probes that were written into the memory."""
        return int(self._probes.sum())

    def take_notifications(self) -> list[tuple[str, bytes]]:
        payloads = super().take_notifications()
        if self.num_written > 0:
            self.stands.set()
            self.go_on.wait()
        return payloads


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandsStill]:
    monkeypatch.setenv("UCX_TLS", "tcp")  # the sender inherits it
    transport = StandsStill(f"d-tail-{time.monotonic_ns()}", torch.zeros(SHAPE))
    yield transport
    transport.go_on.set()


@pytest.fixture
def receiver(transport: StandsStill) -> Iterator[Receiver]:
    receiver = Receiver(transport, lambda: None, lambda error: None)
    receiver.loop.start()
    receiver.expect(True)
    yield receiver
    transport.go_on.set()
    receiver.close()


@pytest.fixture
def sender(receiver: Receiver) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_after_a_drain_nothing_of_a_dead_sender_arrives(
    transport: StandsStill, receiver: Receiver, sender: subprocess.Popen[str]
) -> None:
    assert sender.stdin is not None
    assert sender.stdout is not None
    peer = PeerInfo.decode(base64.b64decode(sender.stdout.readline()))
    receiver.connect(with_key(peer))
    process = PeerProcess(msgspec.structs.replace(peer, started_at=start_time(peer.pid)))
    sender.stdin.write(base64.b64encode(receiver.describe()).decode() + "\n")
    sender.stdin.flush()
    wait_until(transport.stands.is_set, "the write begins")
    sender.stdin.write("\n")
    sender.stdin.flush()
    assert sender.stdout.readline() == "full\n"
    sender.kill()
    wait_until(process.has_ended, "the sender is dead")
    before = transport.num_written
    receiver.drain(peer.engine_id)
    transport.go_on.set()
    kinds: list[TransferEventKind] = []

    def is_drained() -> bool:
        kinds.extend(event.kind for event in receiver.poll())
        return TransferEventKind.PEER_DRAINED in kinds

    wait_until(is_drained, "the drain ends")
    after = transport.num_written
    assert 0 < before < after < SHAPE[0] * 128  # it was dead, and its bytes came
    rounds = receiver.rounds.num_ended
    wait_until(lambda: receiver.rounds.num_ended > rounds + 200, "more reads")
    assert transport.num_written == after
