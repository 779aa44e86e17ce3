"""Faults that come and go with a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.api.errors import ConfigError
from kvconnector.protocol.messages import Watermark
from kvconnector.transports.fault_file import LOOK_EVERY_S, NO_FAULTS, FaultFile, faults_of
from kvconnector.transports.faults import FaultSpec, FaultyTransport
from kvconnector.transports.in_memory import InMemoryTransport
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.unsealed import unsealed
from tests.fakes.time.virtual_clock import VirtualClock

MARK = Watermark(engine_id="f", request_id="a", epoch=1, num_tokens=16)


def test_messages_are_lost_while_the_file_says_so(tmp_path: Path) -> None:
    clock = VirtualClock()
    path = tmp_path / "p0"
    path.touch()
    cache = torch.zeros(4, 2, 3, 8)
    plain = InMemoryTransport("x", memory_of(torch.zeros(4, 2, 3, 8)))
    faulty = FaultyTransport(
        InMemoryTransport("f", memory_of(cache)), memory_of(cache), FaultFile(path, clock), clock
    )
    faulty.connect(plain.peer_info)
    plain.connect(faulty.peer_info)

    def num_heard(text: str) -> int:
        path.write_text(text)
        clock.advance(LOOK_EVERY_S)
        faulty.take_notifications()  # as the I/O thread does in each round
        for _ in range(20):
            faulty.notify("x", unsealed(MARK))
        return len(plain.take_notifications())

    try:
        assert [num_heard(text) for text in ("", "drop=1", "", "duplicate=1", "")] == [
            20, 0, 20, 40, 20,
        ]  # fmt: skip
    finally:
        faulty.close()
        plain.close()


def test_what_is_no_spec_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    path = tmp_path / "f"
    path.write_text("drop=0.25")
    ask = FaultFile(path, clock)
    spec = ask()
    assert spec == FaultSpec(drop=0.25)
    path.write_text("drop=lots")
    assert ask() is spec  # not looked at yet
    clock.advance(LOOK_EVERY_S)
    assert ask() is spec
    assert "drop must be a probability" in caplog.text
    path.unlink()
    clock.advance(LOOK_EVERY_S)
    assert ask() is spec
    path.write_text("")
    clock.advance(LOOK_EVERY_S)
    assert ask() is NO_FAULTS


def test_the_option(tmp_path: Path) -> None:
    assert faults_of("", "p0") is None
    assert faults_of("drop=0.5", "p0") == FaultSpec(drop=0.5)
    (tmp_path / "p0").write_text("drop=0.1")
    for option in (f"@{tmp_path}", f"@{tmp_path / 'p0'}"):
        found = faults_of(option, "p0")
        assert isinstance(found, FaultFile)
        assert found() == FaultSpec(drop=0.1)
    with pytest.raises(ConfigError, match=r"inject_faults: .*d0 is not a file"):
        faults_of(f"@{tmp_path}", "d0")
