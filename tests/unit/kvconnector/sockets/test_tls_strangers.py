"""Tests of TlsTransport against strangers and misbehaving peers: low cost, no damage."""

from __future__ import annotations

import functools
import random
import socket
import ssl

import pytest
import torch

from baton.api.errors import TransferError
from kvconnector.transports.base import QueueFullError
from kvconnector.transports.sockets import incoming, outgoing
from kvconnector.transports.sockets.connection import Connection
from kvconnector.transports.sockets.frames import Kind, WriteHead, encode_frame
from kvconnector.transports.sockets.outgoing import PostedWrite
from tests.fakes.handoff.tls_ends import GRANTED, End, done, meet, rounds_until, where_of
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium

# ---------------------------------------------------------------------- who has no certificate


def raw_connection(d: End) -> socket.socket:
    where = where_of(d.info)
    made = socket.create_connection((where.host, where.port))
    made.settimeout(5)
    return made


def is_closed(d: End, connection: socket.socket) -> bool:
    d.round()
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_strangers_cost_little_and_keep_nobody_out(
    ends: tuple[End, End], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = ends
    strangers = []
    for _ in range(5 * incoming.MAX_STRANGERS):
        strangers.append(raw_connection(d))
        d.round()
    assert len(d.transport._incoming.connections()) == incoming.MAX_STRANGERS
    assert is_closed(d, strangers[0])
    meet(p, d)  # the oldest stranger goes for it
    d.clock.advance(incoming.HELLO_TIMEOUT_S)
    d.round()
    assert len(d.transport._incoming.connections()) == 1
    assert all(is_closed(d, stranger) for stranger in strangers)
    assert len(caplog.messages) <= 2  # one line a second
    meet(p, d)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"\x16\x03\x01\xff\xff" + b"\x01" * 70000],
)
def test_who_does_not_speak_tls_is_hung_up_on(ends: tuple[End, End], data: bytes) -> None:
    _, d = ends
    with raw_connection(d) as stranger:
        stranger.sendall(data)
        wait_until(lambda: is_closed(d, stranger), "the end of the connection")


def test_tls_without_a_certificate_or_below_1_3_is_refused(ends: tuple[End, End]) -> None:
    p, d = ends
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = version
        stranger = raw_connection(d)
        stranger.setblocking(False)
        with context.wrap_socket(stranger, do_handshake_on_connect=False) as tls:
            hello = encode_frame(Kind.HELLO, WriteHead(p.id, 0, []))
            ended = False
            for _ in range(200):
                d.round()
                try:
                    tls.do_handshake()
                    tls.send(hello)
                    ended = tls.recv(1) == b""
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except OSError:
                    ended = True
                if ended:
                    break
            assert ended
    d.round()
    assert d.transport._incoming.connections() == []


# ---------------------------------------------------------------------- who misbehaves


def own_connection(p: End, d: End) -> Connection:
    """The connection of a peer that is known, to say over it what one pleases."""
    meet(p, d)
    (connection,) = p.transport._outgoing[d.id].connections()
    return connection


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff" * 64,
        encode_frame(Kind.WELCOME),
        encode_frame(Kind.WRITE, WriteHead("a", 1, [99]), 1) + b"x",
        encode_frame(Kind.WRITE, WriteHead("a", 1, [3]), 1) + b"x",
        encode_frame(Kind.WRITE, WriteHead("a", 1, [3, 3]), 4096),
        encode_frame(Kind.WRITE, WriteHead("a", 1, [3], (1, 9)), 1) + b"x",
        encode_frame(Kind.HELLO, b"\x92\xa1a\xa1b"),
    ],
)
def test_a_peer_that_sends_nonsense_loses_that_connection_and_no_more(
    ends: tuple[End, End], bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = ends
    other = End("p")
    other.transport.connect(d.info)
    d.transport.connect(other.info)
    meet(other, d)
    d.transport.allow(p.id, GRANTED, [3])
    caplog.set_level("INFO")
    connection = own_connection(p, d)
    connection.post(bad)
    rounds_until((p, d), lambda: connection.problem, "the end of the connection")
    assert not d.blocks.any()
    assert len([line for line in caplog.messages if "KV connection" in line]) == 1
    with pytest.raises(TransferError):
        p.transport.notify(d.id, b"x")
    p.transport.disconnect(d.id)  # as `Peers` does
    p.transport.connect(d.info)
    meet(p, d)
    meet(other, d)
    other.transport.close()


def test_a_listener_that_claims_what_was_not_posted_is_left(ends: tuple[End, End]) -> None:
    p, d = ends
    meet(p, d)
    (connection,) = d.transport._incoming.connections()
    connection.post(encode_frame(Kind.DONE, b"\x92\x01\xc3"))
    rounds_until(ends, lambda: p.transport._outgoing[d.id].problem, "the end of the connection")
    assert "a write that was not posted" in p.transport._outgoing[d.id].problem


def test_a_peer_that_reads_nothing_is_given_up_and_costs_no_more_memory(
    ends: tuple[End, End],
) -> None:
    p, d = ends
    meet(p, d)

    def talk(num_bytes: int) -> None:
        for _ in range(4000):
            p.transport.notify(d.id, bytes(num_bytes))

    (connection,) = p.transport._outgoing[d.id].connections()
    with pytest.raises(QueueFullError, match=f"bytes wait for {d.id}"):
        talk(2**20 - 100)
    assert connection.queued_bytes <= outgoing.MAX_QUEUED_BYTES
    p.transport.notify(d.id, b"a short message")
    with pytest.raises(TransferError, match="reads nothing"):
        talk(1000)
    most = outgoing.MAX_QUEUED_BYTES + outgoing.MAX_SHORT_BYTES
    assert connection.queued_bytes <= most


def test_when_a_peer_dies_all_that_was_posted_fails(ends: tuple[End, End]) -> None:
    p, d = ends
    meet(p, d)
    writes = [p.transport.write(d.id, [0], [1], None, GRANTED) for _ in range(3)]
    d.transport.close()
    rounds_until((p,), lambda: p.transport._outgoing[d.id].problem, "the end")
    for write in writes:
        with pytest.raises(TransferError, match=d.id):
            write.is_done()
    with pytest.raises(TransferError):
        p.transport.notify(d.id, b"x")


def test_keys_are_renewed_when_they_have_done_enough(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = ends
    meet(p, d)
    out = p.transport._outgoing[d.id]
    monkeypatch.setattr(out, "_renew_bytes", 1000)
    (before,) = out.connections()
    d.transport.allow(p.id, GRANTED, [3])
    done(p, d, p.transport.write(d.id, [0], [3], None, GRANTED))
    sent = [b"%d" % i for i in range(40)]
    for payload in sent:
        p.transport.notify(d.id, payload)
        p.round()
        d.round()
    write = p.transport.write(d.id, [1], [3], None, GRANTED)
    done(p, d, write)
    rounds_until(ends, lambda: len(d.heard) == len(sent), "all messages")
    assert sorted(d.heard) == sorted(sent)
    assert torch.equal(d.blocks[3], p.blocks[1])
    rounds_until(ends, lambda: len(out.connections()) == 1, "the end of the old connection")
    assert out.connections() != [before]
    assert before.problem


def are_over(writes: list[PostedWrite]) -> bool:
    return all(write.is_over for write in writes)


def test_of_ten_thousand_forged_replayed_and_late_writes_none_lands(ends: tuple[End, End]) -> None:
    """Forge writes of a known peer, while that peer and another have grants all the time."""
    p, d = ends
    other = End("p")
    other.transport.connect(d.info)
    d.transport.connect(other.info)
    meet(p, d)
    draw = random.Random(7)
    granted, others, free = [1, 2], [3, 4], [0, 5, 6, 7]
    d.transport.allow(other.id, ("b", 1), others)
    num_refused = 0
    for epoch in range(200):
        d.transport.allow(p.id, ("a", epoch), granted)
        good = p.transport.write(d.id, [0, 1], granted, None, ("a", epoch))
        done(p, d, good)
        ended = draw.random() < 0.5 and d.transport.forbid(p.id, ("a", epoch))
        d.blocks[granted] = 0  # what was read of them is in use elsewhere
        bad = []
        for _ in range(50):
            name, number, blocks = draw.choice(
                [
                    ("a", epoch + draw.randrange(1, 9), granted),  # of the future
                    ("a", epoch, [draw.choice(granted), draw.choice(free)]),  # and more
                    ("a", epoch, draw.sample(others, 1)),  # another's blocks
                    ("b", 1, others),  # another's grant
                    (draw.choice(["", "b", "A", "a\0"]), epoch, granted),
                    *([("a", epoch, granted)] * 3 if ended else []),  # late, or once more
                ]
            )
            local = list(range(len(blocks)))
            layers = draw.choice([None, (0, 1), (1, 2)])
            bad.append(p.transport.write(d.id, local, blocks, layers, (name, number)))
        rounds_until((p, d), functools.partial(are_over, bad), "the end of all writes")
        num_refused += sum(not write.is_taken for write in bad)
        assert not d.blocks.any()
        d.transport.forbid(p.id, ("a", epoch))
    assert num_refused == 10_000
    meet(other, d)
    other.transport.close()
