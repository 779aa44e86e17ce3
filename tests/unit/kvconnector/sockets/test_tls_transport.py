"""TlsTransport: only who is known is heard, and only what is granted is written."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest
import torch

from baton.errors import ConfigError, TransferError
from kvconnector.base import PendingWrite, TransportOptions
from kvconnector.peer_info import PeerInfo
from kvconnector.sockets import incoming, outgoing
from kvconnector.sockets.connection import Connection
from kvconnector.sockets.frames import Kind, WriteHead, encode_frame
from kvconnector.sockets.identity import PinnedIdentity
from kvconnector.sockets.transport import TlsTransport, _Where
from tests.fakes.virtual_clock import VirtualClock
from tests.fakes.waiting import wait_until

SHAPE = (8, 2, 2, 4, 8)  # blocks, layers, k and v, heads and tokens, head_dim
GRANTED = ("a", 1)
numbers = count()


class End:
    """A transport whose I/O thread is the test."""

    def __init__(self, name: str, shape: tuple[int, ...] = SHAPE, listen: str = "") -> None:
        self.blocks = torch.rand(shape) if name == "p" else torch.zeros(shape)
        self.clock = VirtualClock()
        options = TransportOptions(listen=listen or "127.0.0.1:0")
        engine_id = f"{name}{next(numbers)}"
        self.transport = TlsTransport(engine_id, self.blocks, options, self.clock)
        self.heard: list[bytes] = []

    @property
    def info(self) -> PeerInfo:
        return self.transport.peer_info

    @property
    def id(self) -> str:
        return self.info.engine_id

    def round(self) -> None:
        self.heard += self.transport.take_notifications()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    p, d = End("p"), End("d")
    p.transport.connect(d.info)
    d.transport.connect(p.info)
    yield p, d
    p.transport.close()
    d.transport.close()


def rounds_until(ends: tuple[End, ...], condition: Callable[[], object], what: str) -> None:
    def look() -> object:
        for end in ends:
            end.round()
        return condition()

    wait_until(look, what)


def meet(p: End, d: End) -> None:
    p.transport.notify(d.id, b"hello")
    rounds_until((p, d), lambda: b"hello" in d.heard, "the first message")
    d.heard.clear()


def done(p: End, d: End, write: PendingWrite) -> None:
    rounds_until((p, d), write.is_done, "the write")


def refused(p: End, d: End, write: PendingWrite) -> None:
    with pytest.raises(TransferError, match="takes no more of this transfer"):
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


def reason(p: End, d: End) -> str:
    """Why the connection does not come about, once that is said."""
    for _ in range(2000):
        try:
            p.transport.notify(d.id, b"x")
        except TransferError as error:
            return str(error)
        p.round()
        d.round()
        p.clock.advance(0.01)
    pytest.fail("no reason is given")


def with_where(info: PeerInfo, where: _Where) -> PeerInfo:
    return msgspec.structs.replace(info, agent_metadata=msgspec.msgpack.encode(where))


def where_of(info: PeerInfo) -> _Where:
    return msgspec.msgpack.decode(info.agent_metadata, type=_Where)


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
    """Its certificate is good, but it is not that engine's."""
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
    assert "what was not posted" in p.transport._outgoing[d.id].problem


def test_a_peer_that_reads_nothing_is_given_up_and_costs_no_more_memory(
    ends: tuple[End, End],
) -> None:
    p, d = ends
    meet(p, d)

    def talk() -> None:
        for _ in range(100):
            p.transport.notify(d.id, bytes(2**20 - 100))

    with pytest.raises(TransferError, match="reads nothing"):
        talk()
    (connection,) = p.transport._outgoing[d.id].connections()
    assert connection.queued_bytes <= outgoing.MAX_QUEUED_BYTES


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
    bad = msgspec.structs.replace(d.info, engine_id="d-bad", agent_metadata=metadata)
    with pytest.raises(TransferError):
        p.transport.connect(bad)
    with pytest.raises(TransferError, match="not connected"):
        p.transport.notify("d-bad", b"x")
