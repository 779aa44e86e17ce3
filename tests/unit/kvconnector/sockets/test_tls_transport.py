"""Unit tests of TlsTransport: it reads only from known peers, and writes only granted blocks."""

from __future__ import annotations

import select

import msgspec
import pytest
import torch

from baton.api.errors import ConfigError, TransferError
from kvconnector.peer_info import RankMemory
from kvconnector.protocol.messages import Grant, encode
from kvconnector.protocol.seals import HEADER_BYTES
from kvconnector.transports.base import PendingWrite
from kvconnector.transports.sockets.connection import ROUND_FRAMES
from kvconnector.transports.sockets.frames import Kind, encode_frame
from kvconnector.transports.sockets.identity import MAX_FORGOTTEN, PinnedIdentity
from kvconnector.transports.sockets.memory import StagedMemory
from kvconnector.transports.sockets.transport import _Where
from tests.fakes.handoff.tls_ends import (
    GRANTED,
    SHAPE,
    End,
    done,
    meet,
    reason,
    rounds_until,
    where_of,
    with_where,
)
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium


def is_readable(end: End) -> bool:
    assert end.transport.descriptor is not None
    return bool(select.select([end.transport.descriptor], [], [], 0)[0])


def refused(p: End, d: End, write: PendingWrite) -> None:
    with pytest.raises(TransferError, match="dropped a write that it does not allow any more"):
        done(p, d, write)


# ---------------------------------------------------------------------- what is written


def test_a_write_lands_where_it_is_granted(ends: tuple[End, End]) -> None:
    p, d = ends
    meet(p, d)
    d.transport.allow(p.id, GRANTED, [3, 5, 6])
    done(p, d, p.transport.write(d.id, [0, 1], [3, 5], None, GRANTED))
    done(p, d, p.transport.write(d.id, [2], [6], (1, 2), GRANTED))
    expected = torch.zeros(SHAPE)
    expected[[3, 5]] = p.blocks[[0, 1]]
    expected[6, 1] = p.blocks[2, 1]
    assert torch.equal(d.blocks, expected)


def test_the_kernel_tells_the_round_trip_to_a_peer(ends: tuple[End, End]) -> None:
    p, d = ends
    assert p.transport.round_trip_s(d.id) == 0.0
    meet(p, d)
    assert 0 < p.transport.round_trip_s(d.id) < 1


def test_memory_that_is_staged_is_written_and_kept_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage memory at both ends, as for a GPU; host memory stands in for the GPU's."""
    monkeypatch.setattr("kvconnector.transports.sockets.transport.memory_of", StagedMemory)
    p, d = End("p"), End("d")
    p.transport.connect(d.info)
    d.transport.connect(p.info)
    meet(p, d)
    d.transport.allow(p.id, GRANTED, [3, 5])
    d.transport.scratch.lend(1, p.id)
    done(p, d, p.transport.write_scratch(d.id, 1))
    assert d.transport.scratch.digest_of(1) == p.transport.scratch.digest
    done(p, d, p.transport.write(d.id, [0], [5], (0, 1), GRANTED))
    late = p.transport.write(d.id, [1, 2], [3, 5], None, GRANTED)
    d.transport.forbid(p.id, GRANTED)
    refused(p, d, late)
    expected = torch.zeros(SHAPE)
    expected[5, 0] = p.blocks[0, 0]
    assert torch.equal(d.blocks, expected)
    p.transport.close()
    d.transport.close()


@pytest.mark.parametrize(
    ("transfer", "block_ids"),
    [
        (("b", 1), [3]),  # another request
        (("a", 2), [3]),  # another epoch
        (("a", 1), [4]),  # another block
        (("a", 1), [3, 4]),  # not all of it
    ],
)
def test_what_no_grant_holds_is_not_written_and_the_sender_is_told(
    ends: tuple[End, End], transfer: tuple[str, int], block_ids: list[int]
) -> None:
    p, d = ends
    meet(p, d)
    d.transport.allow(p.id, GRANTED, [3, 5])
    local = list(range(len(block_ids)))
    refused(p, d, p.transport.write(d.id, local, block_ids, None, transfer))
    assert not d.blocks.any()
    done(p, d, p.transport.write(d.id, [0], [5], None, GRANTED))  # the connection is none the worse


def test_after_its_end_a_transfer_writes_nothing_even_into_blocks_granted_anew(
    ends: tuple[End, End],
) -> None:
    p, d = ends
    meet(p, d)
    d.transport.allow(p.id, GRANTED, [3])
    late = p.transport.write(d.id, [0], [3], None, GRANTED)  # on its way
    assert d.transport.forbid(p.id, GRANTED)
    assert not d.transport.forbid(p.id, GRANTED)
    d.transport.allow(p.id, ("b", 1), [3])
    refused(p, d, late)
    assert not d.blocks.any()
    done(p, d, p.transport.write(d.id, [1], [3], None, ("b", 1)))
    assert torch.equal(d.blocks[3], p.blocks[1])


def test_a_write_that_is_under_way_stops_where_its_grant_ends() -> None:
    shape = (8, 2, 2, 256, 1024)  # 4 MiB a block: more than the sockets hold
    p, d = End("p", shape), End("d", shape)
    p.transport.connect(d.info)
    d.transport.connect(p.info)
    meet(p, d)
    d.transport.allow(p.id, GRANTED, range(8))
    write = p.transport.write(d.id, range(8), range(8), None, GRANTED)
    rounds_until((p, d), lambda: d.blocks[0].any(), "the first bytes")
    assert not d.blocks[7].any()
    assert d.transport.forbid(p.id, GRANTED)
    before = d.blocks.clone()
    refused(p, d, write)
    assert torch.equal(d.blocks, before)
    p.transport.close()
    d.transport.close()


def test_a_grant_is_to_one_peer_alone(ends: tuple[End, End]) -> None:
    p, d = ends
    other = End("p")
    other.transport.connect(d.info)
    d.transport.connect(other.info)
    meet(p, d)
    meet(other, d)
    d.transport.allow(p.id, GRANTED, [3])
    refused(other, d, other.transport.write(d.id, [0], [3], None, GRANTED))
    assert not d.blocks.any()
    other.transport.close()


def test_grants_outlive_a_peer_that_is_met_anew_at_once_and_not_one_that_is_gone(
    ends: tuple[End, End],
) -> None:
    p, d = ends
    meet(p, d)
    d.transport.allow(p.id, GRANTED, [3])
    d.transport.disconnect(p.id)
    d.transport.connect(p.info)  # our way to it had failed; its way to us has not
    done(p, d, p.transport.write(d.id, [0], [3], None, GRANTED))
    d.transport.disconnect(p.id)
    d.round()
    assert not d.transport.forbid(p.id, GRANTED)
    write = p.transport.write(d.id, [1], [3], None, GRANTED)
    with pytest.raises(TransferError, match=r"closed the connection|reset|broken pipe"):
        done(p, d, write)
    assert torch.equal(d.blocks[3], p.blocks[0])


# ---------------------------------------------------------------------- who is heard


def test_messages_go_both_ways_in_order(ends: tuple[End, End]) -> None:
    p, d = ends
    sent = [b"%d" % i * (i + 1) for i in range(300)]
    for payload in sent:
        p.transport.notify(d.id, payload)
        d.transport.notify(p.id, payload)
    rounds_until(ends, lambda: len(p.heard) == len(d.heard) == len(sent), "all messages")
    assert p.heard == d.heard == sent
    assert (p.heard_of, d.heard_of) == ({d.id}, {p.id})  # as their certificates say


def test_the_descriptor_shows_messages_and_bytes_that_the_kernel_did_not_take(
    ends: tuple[End, End],
) -> None:
    """The I/O thread sleeps on the descriptor."""
    p, d = ends
    meet(p, d)
    rounds_until(ends, lambda: not is_readable(p) and not is_readable(d), "rest")
    p.transport.notify(d.id, b"news")
    wait_until(lambda: is_readable(d), "the message")
    rounds_until((d,), lambda: d.heard == [b"news"], "the message")
    assert not is_readable(d)
    (connection,) = p.transport._outgoing[d.id].connections()
    connection.post(encode_frame(Kind.MESSAGE, b"x" * 2**20) * 16)
    rounds_until((p,), lambda: connection.wants_write, "a full send buffer")
    assert not is_readable(p)
    rounds_until((d,), lambda: is_readable(p), "room in the send buffer")
    rounds_until(ends, lambda: len(d.heard) == 17, "all messages")


def test_a_grant_of_as_many_blocks_as_a_message_may_have_arrives(ends: tuple[End, End]) -> None:
    """Regression: a longer message counted as a broken connection."""
    p, d = ends
    meet(p, d)
    name = "x" * 512
    ids = [2**31 - 1] * 2**20
    grant = encode(Grant(engine_id=name, request_id=name, epoch=2**32 - 1, block_ids=ids))
    p.transport.notify(d.id, bytes(HEADER_BYTES) + grant)
    rounds_until(ends, lambda: d.heard, "the grant")
    assert len(d.heard[0]) == HEADER_BYTES + len(grant)


@pytest.mark.parametrize("closes", [False, True])
def test_a_turn_reads_a_limited_number_of_frames_and_the_next_turns_the_rest(
    ends: tuple[End, End], closes: bool
) -> None:
    """Regression: 1 MiB of empty messages, 80,659 frames, took one turn of 0.5 s."""
    p, d = ends
    meet(p, d)
    (connection,) = p.transport._outgoing[d.id].connections()
    num_frames = 3 * ROUND_FRAMES + 5
    connection.post(encode_frame(Kind.MESSAGE, b"x") * num_frames)
    rounds_until((p,), lambda: not connection.queued_bytes, "an empty queue")
    if closes:
        connection.end_sending()
    while len(d.heard) < num_frames:
        assert is_readable(d)
        before = len(d.heard)
        d.round()
        assert len(d.heard) - before <= ROUND_FRAMES
    rounds_until((d,), lambda: closes or not is_readable(d), "rest")
    assert d.heard == [b"x"] * num_frames


def test_who_is_learnt_late_is_dialled_until_it_answers(ends: tuple[End, End]) -> None:
    _, d = ends
    late = End("p")
    late.transport.connect(d.info)
    late.transport.notify(d.id, b"hello")
    for _ in range(20):
        late.round()
        d.round()
        late.clock.advance(0.02)
    assert d.heard == []  # no router has told it
    d.transport.connect(late.info)
    late.clock.advance(1.0)
    rounds_until((late, d), lambda: d.heard == [b"hello"], "the message")
    late.transport.close()


def test_a_peer_that_shows_another_certificate_is_not_spoken_to(ends: tuple[End, End]) -> None:
    p, d = ends
    other = End("d")
    p.transport.connect(other.info)  # its certificate is known, as another's
    at = where_of(d.info)
    mixed = msgspec.structs.replace(at, identity=where_of(other.info).identity)
    p.transport.connect(with_where(d.info, mixed))
    assert "certificate is not the one that the router told us of" in reason(p, d)
    stranger = msgspec.structs.replace(at, identity=PinnedIdentity().own)
    third = End("p")
    third.transport.connect(with_where(d.info, stranger))
    assert "its certificate is refused: self-signed certificate" in reason(third, d)
    assert d.heard == []
    for end in (other, third):
        end.transport.close()


def test_a_peer_cannot_speak_for_another(
    ends: tuple[End, End], caplog: pytest.LogCaptureFixture
) -> None:
    """Refuse a valid certificate of another engine."""
    p, d = ends
    thief = End("p")
    d.transport.connect(thief.info)
    d.clock.advance(2.0)  # the next line is logged
    thief.transport.peer_info = msgspec.structs.replace(thief.info, engine_id=p.id)
    thief.transport.connect(d.info)
    reason(thief, d)
    assert d.heard == []
    (line,) = caplog.messages
    assert f"it is not {p.id}: its certificate is another's" in line
    thief.transport.close()


def test_who_looks_for_an_engine_that_was_here_before_is_refused(ends: tuple[End, End]) -> None:
    p, d = ends
    old = msgspec.structs.replace(d.info, engine_id="d-before")
    p.transport.connect(old)
    p.transport.notify("d-before", b"x")
    for _ in range(50):
        p.round()
        d.round()
    assert d.heard == []


def test_nobody_listens_at_all_and_that_is_said(ends: tuple[End, End]) -> None:
    p, d = ends
    d.transport.close()
    d.transport.take_notifications = list  # type: ignore[method-assign]  # it is no more
    assert "connection refused" in reason(p, d)


# ---------------------------------------------------------------------- where it listens


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("0.0.0.0:0", "must be one of this machine's"),
        ("[::]:0", "must be one of this machine's"),
        ("192.0.2.1:1", "cannot listen at 192.0.2.1:1"),
        ("127.0.0.1:99999", "must be host:port"),
    ],
)
def test_an_address_that_peers_cannot_dial_is_refused(listen: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_listen: .*{words}"):
        End("d", listen=listen)


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(_Where("example.com", 80, b"x")),  # nothing is looked up
        msgspec.msgpack.encode(["127.0.0.1", 0, b"x"]),
        msgspec.msgpack.encode(["127.0.0.1", 2**16, b"x"]),
        msgspec.msgpack.encode(["127.0.0.1", 80, b"no certificate"]),
    ],
)
def test_peer_info_that_says_nothing_of_where_it_is_is_refused(
    ends: tuple[End, End], metadata: bytes
) -> None:
    p, d = ends
    bad = msgspec.structs.replace(
        d.info, engine_id="d-bad", ranks=(RankMemory(agent_metadata=metadata),)
    )
    with pytest.raises(TransferError):
        p.transport.connect(bad)
    with pytest.raises(TransferError, match="not connected"):
        p.transport.notify("d-bad", b"x")


def test_a_slot_for_self_tests_is_written_by_whom_it_was_lent_to(ends: tuple[End, End]) -> None:
    p, d = ends
    meet(p, d)
    for borrower in ("", "another"):
        if borrower:
            d.transport.scratch.lend(1, borrower)
        write = p.transport.write_scratch(d.id, 1)
        with pytest.raises(TransferError):
            done(p, d, write)
        assert not d.transport.scratch.memory[2].any()
    d.transport.scratch.lend(1, p.id)
    done(p, d, p.transport.write_scratch(d.id, 1))
    assert d.transport.scratch.digest_of(1) == p.transport.scratch.digest


def test_certificates_of_nodes_that_came_and_went_are_not_kept(ends: tuple[End, End]) -> None:
    p, d = ends
    identity = PinnedIdentity()
    identity.learn(where_of(d.info).identity)
    for _ in range(3 * MAX_FORGOTTEN):
        identity.learn(shown := PinnedIdentity().own)
        identity.forget(shown)
    for is_server in (True, False):
        num_kept = identity.context(is_server=is_server).cert_store_stats()["x509"]
        assert 1 <= num_kept <= MAX_FORGOTTEN + 2
    with pytest.raises(TransferError, match="no certificate of its own making"):
        identity.learn(where_of(d.info).identity + where_of(p.info).identity)
