"""Tests of a dead prefill node's blocks: free once its last bytes are read."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from baton.api.sampling_params import SamplingParams
from kvconnector.peer_info import PeerInfo, RankMemory, host_identity
from kvconnector.peer_process import PeerProcess, start_time
from kvconnector.protocol.dead_peers import DRAIN_READS, DRAIN_S, DeadPeers
from tests.fakes.handoff.kv_memories import manifest
from tests.fakes.time.waiting import wait_until
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of

pytestmark = pytest.mark.medium

EXIT_THREAD = {"x86_64": 60, "aarch64": 93}  # number of the system call
ZOMBIE_LEADER = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall(%d, 0)
"""


def test_blocks_of_a_dead_prefill_node_are_free_when_its_sockets_are_empty_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: True)
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
    for _ in range(DRAIN_READS):
        cluster.round("d")
        cluster.step("d")
        assert cluster.d.beat().num_quarantined_blocks == num_quarantined
    cluster.clock.advance(DRAIN_S)
    cluster.round("d")
    cluster.step("d")
    assert target.socket == []
    assert_clean(cluster)


def test_a_drain_takes_both_reads_and_time() -> None:
    peers = DeadPeers()
    peers.add_dead_peer("p", 10.0, 5)
    peers.add_dead_peer("p", 11.0, 50)  # known already
    assert peers.take_drained(10.0 + DRAIN_S, 5 + DRAIN_READS - 1) == []
    assert peers.take_drained(9.9 + DRAIN_S, 5 + DRAIN_READS) == []
    assert peers.take_drained(10.0 + DRAIN_S, 5 + DRAIN_READS) == ["p"]
    assert peers.take_drained(1e9, 10**9) == []


def info_of(pid: int, host: str | None = None, started_at: int | None = None) -> PeerInfo:
    return PeerInfo(
        engine_id="p",
        connector="nixl",
        host=host_identity() if host is None else host,
        pid=pid,
        manifest=manifest(1, 1, 1),
        num_blocks=1,
        ranks=(RankMemory(),),
        started_at=start_time(pid) if started_at is None else started_at,
    )


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_is_dead_when_it_has_ended_and_not_when_it_is_elsewhere() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        info = info_of(process.pid)
        watched, elsewhere, unknown = (
            PeerProcess(one)
            for one in (info, info_of(process.pid, "another machine"), info_of(process.pid, ""))
        )
        assert not watched.has_ended()
        process.kill()
        wait_until(watched.has_ended, "the process is dead")
        assert state_of(process.pid) == "Z"  # nobody has asked for its exit code yet
    assert watched.has_ended()
    assert not elsewhere.has_ended()
    assert not unknown.has_ended()
    assert not PeerProcess(info).has_ended()  # met when it was dead: it might be anybody
    assert not PeerProcess(info_of(os.getpid())).has_ended()
    watched.close()
    assert not watched.has_ended()


@pytest.mark.skipif(platform.machine() not in EXIT_THREAD, reason="number of the system call")
def test_a_process_whose_first_thread_alone_has_ended_is_not_dead() -> None:
    script = ZOMBIE_LEADER % EXIT_THREAD[platform.machine()]
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        watched = PeerProcess(info_of(process.pid))
        wait_until(lambda: state_of(process.pid) == "Z", "the first thread ends")
        assert not watched.has_ended()  # it may still copy
        process.kill()
        wait_until(watched.has_ended, "the process is dead")
    watched.close()


def test_what_proc_does_not_show_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a live process that /proc hides as alive, as with hidepid or other containers."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        info = info_of(process.pid)

        def hide(path: Path, *arguments: object, **options: object) -> str:
            raise FileNotFoundError(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", hide)
            patch.setattr(Path, "iterdir", hide)
            hidden = PeerProcess(info)
            assert not hidden.has_ended()
        seen = PeerProcess(info)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", hide)
            assert not seen.has_ended()
            process.kill()
            wait_until(seen.has_ended, "the process is dead")  # what was met once needs no /proc
        assert not hidden.has_ended()  # unknown stays unknown
    for one in (hidden, seen):
        one.close()


def test_another_process_under_the_same_number_proves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        peer = info_of(process.pid, started_at=start_time(process.pid) - 1)
        other = PeerProcess(peer)
        process.kill()
        process.wait()
        assert not other.has_ended()


def test_a_peer_that_is_forgotten_is_watched_no_more() -> None:
    cluster = make_cluster(20)
    gone = cluster.d.reservations.quarantine
    assert list(gone._processes) == ["p"]
    cluster.kill("p")
    cluster.settle()
    assert gone._processes == {}
