"""When a dead prefill node's blocks are free: it has ended, and what it had sent is taken in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from decode_node import gone_peers
from decode_node.gone_peers import is_dead
from kvconnector import drains
from kvconnector.drains import Drains
from kvconnector.peer_info import PeerInfo, host_identity
from tests.fakes.waiting import wait_until
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of

EXIT_THREAD = {"x86_64": 60, "aarch64": 93}  # number of the system call
ZOMBIE_LEADER = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall(%d, 0)
"""


def test_blocks_of_a_dead_prefill_node_are_free_when_its_sockets_are_empty_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gone_peers, "is_dead", lambda peer: True)
    cluster = make_cluster(20)
    cluster.place("a", 1, prompt_of(1, 10), SamplingParams(max_tokens=3))
    while len(cluster.network.writes) < 2:
        cluster.step("p")
        cluster.step("d")
        while cluster.network.messages:
            cluster.network.deliver(0)
        cluster.round("p")
        cluster.round("d")
    cluster.attempts["a", 1].is_open = False
    target = cluster.network.writes[0].target
    cluster.kill("p")
    assert len(target.socket) >= 2
    for _ in range(100):  # time passes, and the I/O thread stands still
        cluster.clock.advance(1.0)
        cluster.step("d")
    num_quarantined = cluster.d.beat().num_quarantined_blocks
    assert num_quarantined > 0
    for _ in range(drains.MIN_READS):
        cluster.round("d")
        cluster.step("d")
        assert cluster.d.beat().num_quarantined_blocks == num_quarantined
    cluster.clock.advance(drains.MIN_S)
    cluster.round("d")
    cluster.step("d")
    assert target.socket == []
    assert_clean(cluster)


def test_a_drain_takes_both_reads_and_time() -> None:
    drained = Drains()
    drained.add("p", 10.0, 5)
    drained.add("p", 11.0, 50)  # known already
    assert drained.take_done(10.0 + drains.MIN_S, 5 + drains.MIN_READS - 1) == []
    assert drained.take_done(9.9 + drains.MIN_S, 5 + drains.MIN_READS) == []
    assert drained.take_done(10.0 + drains.MIN_S, 5 + drains.MIN_READS) == ["p"]
    assert drained.take_done(1e9, 10**9) == []


def info_of(pid: int, host: str | None = None) -> PeerInfo:
    return PeerInfo(
        engine_id="p",
        connector="nixl",
        host=host_identity() if host is None else host,
        pid=pid,
        agent_metadata=b"",
        base_address=0,
        block_bytes=1,
        block_size=1,
        num_blocks=1,
        device_id=0,
        layout="",
    )


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_is_dead_when_it_has_ended_and_not_when_it_is_elsewhere() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_dead(info_of(process.pid))
        process.kill()
        wait_until(lambda: is_dead(info_of(process.pid)), "the process is dead")
        assert state_of(process.pid) == "Z"  # nobody has asked for its exit code yet
    assert is_dead(info_of(process.pid))
    assert not is_dead(info_of(process.pid, host="another machine"))
    assert not is_dead(info_of(process.pid, host=""))
    assert not is_dead(info_of(os.getpid()))


@pytest.mark.skipif(platform.machine() not in EXIT_THREAD, reason="number of the system call")
def test_a_process_whose_first_thread_alone_has_ended_is_not_dead() -> None:
    script = ZOMBIE_LEADER % EXIT_THREAD[platform.machine()]
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        wait_until(lambda: state_of(process.pid) == "Z", "the first thread ends")
        assert not is_dead(info_of(process.pid))  # it may still copy
        process.kill()
        wait_until(lambda: is_dead(info_of(process.pid)), "the process is dead")
