"""A stopped sender's connections are shut down, and none of its bytes arrives when it goes on."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from kvconnector.peer_info import PeerInfo
from kvconnector.transports.nixl.transport import NixlTransport
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(120)]
SHAPE = (128, 4, 2, 4, 64, 64)  # 64 MiB in blocks of 512 KiB
KEY = ("r", 1)
# Sends a message, posts all blocks in one write, and prints how the write has ended.
SENDER = f"""
import base64, os, sys, time, torch
from baton.api.errors import TransferError
from kvconnector.transports.nixl.transport import NixlTransport
from kvconnector.peer_info import PeerInfo
from tests.fakes.handoff.kv_memories import memory_of
transport = NixlTransport(f"p-{{os.getpid()}}", memory_of(torch.ones({SHAPE})))
print(base64.b64encode(transport.peer_info.encode()).decode(), flush=True)
peer = PeerInfo.decode(base64.b64decode(sys.stdin.readline()))
transport.connect(peer)
transport.notify(peer.engine_id, b"hello")
blocks = range({SHAPE[0]})
write = transport.write(peer.engine_id, blocks, blocks)
try:
    while not write.is_done():
        time.sleep(0.0001)
    print("complete", flush=True)
except TransferError:
    print("failed", flush=True)
"""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setenv("UCX_TLS", "tcp")  # the sender inherits it
    return torch.zeros(SHAPE)


@pytest.fixture
def receiver(memory: torch.Tensor) -> Iterator[NixlTransport]:
    transport = NixlTransport(f"d-fence-{time.monotonic_ns()}", memory_of(memory))
    yield transport
    transport.close()


@pytest.fixture
def sender() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("is_killed", [True, False])
def test_no_byte_arrives_after_forbid_returned_true_for_a_silent_peer(
    memory: torch.Tensor,
    receiver: NixlTransport,
    sender: subprocess.Popen[str],
    is_killed: bool,
) -> None:
    """A stopped process is not dead: its connections stay open, and it goes on later."""
    assert sender.stdin is not None
    assert sender.stdout is not None
    peer = PeerInfo.decode(base64.b64decode(sender.stdout.readline()))
    elsewhere = msgspec.structs.replace(peer, host="another machine")
    receiver.connect(elsewhere)
    sender.stdin.write(base64.b64encode(receiver.peer_info.encode()).decode() + "\n")
    sender.stdin.flush()
    probes = memory.view(-1)[::1024]

    def has_begun() -> bool:
        receiver.take_notifications()
        return bool(probes.any())

    wait_until(has_begun, "the write begins")
    assert not receiver.forbid(peer.engine_id, KEY)
    os.kill(sender.pid, signal.SIGKILL if is_killed else signal.SIGSTOP)

    def is_over() -> bool:
        receiver.take_notifications()
        return receiver.forbid(peer.engine_id, KEY)

    wait_until(is_over, "no byte can arrive any more", timeout_s=30)
    before = int(probes.sum())
    assert 0 < before < len(probes)
    os.kill(sender.pid, signal.SIGCONT)
    if not is_killed:

        def has_ended() -> bool:
            receiver.take_notifications()
            return sender.poll() is not None

        wait_until(has_ended, "the sender's write ends", timeout_s=30)
        assert sender.stdout.readline() == "failed\n"
    for _ in range(500):
        receiver.take_notifications()
    assert int(probes.sum()) == before
