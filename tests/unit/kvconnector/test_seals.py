"""Unit tests of seals: a message is accepted once, by its addressee, from its true sender."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import TransferError
from kvconnector.peer_info import PeerInfo, RankMemory
from kvconnector.protocol.pair_keys import KeyPair
from kvconnector.protocol.seals import (
    HEADER_BYTES,
    TAG_BYTES,
    WINDOW,
    Channel,
    Channels,
    Refusal,
    RefusedMessageError,
    ReplayWindow,
)
from tests.fakes.handoff.kv_memories import manifest

INFO = PeerInfo(
    engine_id="",
    connector="in_memory",
    host="",
    pid=0,
    manifest=manifest(1, 1, 1),
    num_blocks=1,
    ranks=(RankMemory(),),
)


def info_of(engine_id: str, channels: Channels) -> PeerInfo:
    return msgspec.structs.replace(INFO, engine_id=engine_id, public_key=channels.public_key)


def meet(a: str, a_channels: Channels, b: str, b_channels: Channels) -> tuple[Channel, Channel]:
    a_channels.learn(info_of(b, b_channels))
    b_channels.learn(info_of(a, a_channels))
    return a_channels[b], b_channels[a]


def pair() -> tuple[Channel, Channel]:
    return meet("p", Channels("p"), "d", Channels("d"))


def refusal(channel: Channel, payload: bytes) -> Refusal:
    with pytest.raises(RefusedMessageError) as caught:
        channel.open(payload)
    return caught.value.reason


def test_what_one_end_seals_the_other_opens_in_both_directions() -> None:
    p, d = pair()
    assert d.open(p.seal(b"start")) == b"start"
    assert p.open(d.seal(b"grant")) == b"grant"
    assert d.open(p.seal(b"")) == b""


def test_a_message_is_heard_once() -> None:
    p, d = pair()
    payload = p.seal(b"quiet")
    assert d.open(payload) == b"quiet"
    assert refusal(d, payload) is Refusal.REPLAYED
    assert d.open(p.seal(b"quiet")) == b"quiet"  # said again


def test_a_message_that_comes_back_to_its_author_is_refused() -> None:
    p, _ = pair()
    assert refusal(p, p.seal(b"beat")) is Refusal.FORGED


@given(st.data())
def test_every_changed_or_cut_message_is_refused(data: st.DataObject) -> None:
    p, d = pair()
    payload = bytearray(p.seal(data.draw(st.binary(max_size=40))))
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(payload) - 1))
        payload[bit // 8] ^= 1 << bit % 8
    else:
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    assert refusal(d, bytes(payload)) is Refusal.FORGED


@given(st.binary(max_size=100))
def test_nobody_without_the_key_is_heard(payload: bytes) -> None:
    _, d = pair()
    assert refusal(d, payload) is Refusal.FORGED


def test_messages_of_another_pair_or_of_another_life_are_refused() -> None:
    p, d, x = Channels("p"), Channels("d"), Channels("x")
    p_to_d, d_to_p = meet("p", p, "d", d)
    p_to_x, _ = meet("p", p, "x", x)
    assert refusal(d_to_p, p_to_x.seal(b"quiet")) is Refusal.FORGED
    again = Channels("d")  # d was started anew, and even under the same name
    again.learn(info_of("p", p))
    assert refusal(again["p"], p_to_d.seal(b"quiet")) is Refusal.FORGED


def test_a_process_start_keeps_its_key() -> None:
    p = Channels("p")
    p.learn(info_of("d", Channels("d")))
    first = p["d"]
    with pytest.raises(TransferError, match="d is known with another public key"):
        p.learn(info_of("d", Channels("d")))
    assert p["d"] is first


def test_what_was_heard_before_a_peer_left_is_not_heard_when_it_is_back() -> None:
    p, d = Channels("p"), Channels("d")
    p_to_d, d_to_p = meet("p", p, "d", d)
    payload = p_to_d.seal(b"quiet")
    assert d_to_p.open(payload) == b"quiet"
    d.learn(info_of("p", p))  # the router lost it and found it again
    assert refusal(d["p"], payload) is Refusal.REPLAYED


@pytest.mark.parametrize("public_key", [b"", b"short", bytes(32), b"\x01" + bytes(31)])
def test_a_public_key_that_is_none_is_refused(public_key: bytes) -> None:
    info = msgspec.structs.replace(INFO, engine_id="d", public_key=public_key)
    with pytest.raises(TransferError, match="public key for KV messages"):
        Channels("p").learn(info)


def test_keys_differ_by_direction_use_and_names_and_are_not_shown() -> None:
    one, other = KeyPair(), KeyPair()
    keys = one.agree("p", "d", other.public)
    same = other.agree("d", "p", one.public)
    renamed = one.agree("p2", "d", other.public)
    assert (keys.send, keys.receive) == (same.receive, same.send)
    assert len({keys.send, keys.receive, renamed.send, renamed.receive}) == 4
    # Lengths are in what is derived from: ids cannot run into each other.
    assert one.agree("pd", "x", other.public).send != one.agree("p", "dx", other.public).send
    assert repr(keys) == "PairKeys()"
    block_keys = (keys.send_blocks, same.receive_blocks, keys.receive_blocks, same.send_blocks)
    there, arrived, back, came_back = (key.digest(1, b"", memoryview(b"kv")) for key in block_keys)
    assert there == arrived
    assert back == came_back
    assert there != back


def test_the_tag_is_over_number_and_message() -> None:
    p, _ = pair()
    first, second = p.seal(b"a"), p.seal(b"a")
    assert first[TAG_BYTES:HEADER_BYTES] != second[TAG_BYTES:HEADER_BYTES]
    assert first[:TAG_BYTES] != second[:TAG_BYTES]


@given(st.permutations(range(1, 60)))
def test_numbers_come_in_any_order_and_once(numbers: list[int]) -> None:
    window = ReplayWindow()
    assert all(window.accept_number(number) for number in numbers)
    assert not any(window.accept_number(number) for number in numbers)


def test_what_came_much_too_late_counts_as_lost() -> None:
    window = ReplayWindow()
    assert window.accept_number(5)
    assert window.accept_number(5 + WINDOW - 1)
    assert not window.accept_number(5)
    assert window.accept_number(6)
    assert window.accept_number(2**64 - 1)
    assert not window.accept_number(7)
    assert window.accept_number(2**64 - WINDOW)
    assert not window.accept_number(2**64 - WINDOW - 1)
    assert not window.accept_number(0)


def test_no_churn_of_others_takes_the_channel_of_a_peer_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvconnector.protocol.seals.MAX_CHANNELS", 4)
    ours, theirs = Channels("p"), Channels("d")
    sent, _ = meet("p", ours, "d", theirs)
    for number in range(20):
        ours.learn(info_of(f"other{number}", theirs), present={"d"})
    assert ours["d"] is sent
    everybody = {"d", *(f"other{number}" for number in range(20))}
    with pytest.raises(TransferError, match="4 peers are connected, which is the maximum"):
        ours.learn(info_of("one more", theirs), present=everybody)
