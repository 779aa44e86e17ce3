"""Unit tests of links between ranks: who may connect, and what a missing rank costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.processes import rank_links


def test_links_stay_open_when_the_socket_is_gone() -> None:
    with rank_links.listen() as listener:
        theirs = rank_links.connect(listener.address, b"7")
        folder = Path(listener.address).parent
        assert folder.stat().st_mode & 0o777 == 0o700, "other users cannot enter the folder"
        greeting, ours = listener.accept()
    assert greeting == b"7"
    assert not folder.exists()
    theirs.send_bytes(b"to the leader")
    ours.send_bytes(b"to the rank")
    assert (ours.recv_bytes(), theirs.recv_bytes()) == (b"to the leader", b"to the rank")
    ours.close()
    theirs.close()


def test_a_rank_that_does_not_connect_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_links, "START_TIMEOUT_S", 0.01)
    with rank_links.listen() as listener, pytest.raises(TimeoutError):
        listener.accept()
