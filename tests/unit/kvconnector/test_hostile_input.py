"""Tests of hostile messages: none raises an unexpected error, and none costs much."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import TransferError
from baton.kv.manifest import KVManifest
from baton.limits import MAX_PEER_INFO_BYTES
from kvconnector.base import HANDOFF_VERSION, HandoffRecord, TransferEvent, TransferEventKind
from kvconnector.peer_info import PeerInfo, RankMemory
from kvconnector.protocol.actions import Connect, ConnectEnded, Meet
from kvconnector.protocol.messages import Commit, Digests, Grant, Quiet, decode, encode
from kvconnector.protocol.receiver import ReceiveMachine
from kvconnector.protocol.seals import peek
from tests.fakes.handoff.kv_memories import manifest
from tests.fakes.handoff.peer_infos import peer_info
from tests.fakes.time.line_counts import count_lines

(GROUP,) = manifest(2, 4, 4).groups
GROUP_OF_TOO_MANY_LAYERS = msgspec.structs.replace(GROUP, num_places=1)

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NAMES = ("Hello", "HelloAck", "SelfTest", "Start", "Grant", "Commit", "Digests", "Resend", "Beat")
FIELDS = ("engine_id", "request_id", "epoch", "block_ids", "indices", "digests", "layers", "test")
COMMIT = Commit(
    engine_id="p",
    request_id="a",
    epoch=1,
    record=HandoffRecord(token_id=1, num_tokens=1),
    num_bytes=1,
    num_blocks=1,
    transport="",
    exposed_transfer_s=0.0,
)


def is_data(blob: bytes) -> None:
    for read in (decode, peek, PeerInfo.decode):
        try:
            read(blob)
        except TransferError:
            continue


@given(st.binary(max_size=500))
def test_any_bytes_are_data(blob: bytes) -> None:
    is_data(blob)


@pytest.mark.medium
@given(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(FIELDS), json_like))
def test_any_fields_are_data(name: str, fields: dict[str, object]) -> None:
    try:
        blob = msgspec.msgpack.encode({"type": name, **fields})
    except OverflowError:  # more than the format can say
        return
    is_data(blob)


@given(st.data())
def test_any_damage_of_a_message_is_data(data: st.DataObject) -> None:
    blob = bytearray(encode(COMMIT))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    is_data(bytes(blob))


def test_nesting_without_end_is_data() -> None:
    is_data(b"\x91" * 100_000)
    is_data(b"\xdd\xff\xff\xff\xff")  # an array of four thousand million, of which nothing follows


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(COMMIT, exposed_transfer_s=math.nan),
        msgspec.structs.replace(COMMIT, posting_s=math.inf),
        msgspec.structs.replace(COMMIT, exposed_transfer_s=-1.0),
        Quiet(engine_id="p", request_id="a" * 513, epoch=1, reason=""),
        Quiet(engine_id="p", request_id="a", epoch=1, reason="x" * 4097),
        Grant(engine_id="d", request_id="a", epoch=1, block_ids=[0] * (2**20 + 1)),
        Digests(engine_id="p", request_id="a", epoch=1, indices=[0] * 4097, digests=b""),
        Digests(engine_id="p", request_id="a", epoch=1, indices=[0], digests=bytes(2**16 + 1)),
    ],
)
def test_what_is_too_long_or_no_number_is_refused(message: Commit) -> None:
    with pytest.raises(TransferError, match="not a message of this protocol"):
        decode(encode(message))


def test_a_giant_peer_info_is_refused_before_it_is_read() -> None:
    with pytest.raises(TransferError, match=f"at most {MAX_PEER_INFO_BYTES} bytes"):
        PeerInfo.decode(bytes(MAX_PEER_INFO_BYTES + 1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": (RankMemory(), RankMemory())}, "ranks: the peer info lists 2"),
        ({"num_blocks": 2**30}, "memory beyond the address"),
        ({"manifest": KVManifest(groups=(GROUP_OF_TOO_MANY_LAYERS,))}, "layers"),
        (
            {
                "manifest": KVManifest(groups=(GROUP,), num_ranks=1024),
                "ranks": (RankMemory(),) * 1024,
            },
            "at most 64 per stage",
        ),
    ],
)
def test_a_peer_that_describes_what_cannot_be_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    memory = RankMemory(base_address=2**63 - 2**34)
    fields = {"ranks": (memory,), "num_blocks": 1} | change
    info = msgspec.structs.replace(peer_info("p"), **fields)
    with pytest.raises(TransferError, match=problem):
        PeerInfo.decode(info.encode())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"connector": "pigeon"}, "uses the connector pigeon, not scripted"),
        ({"manifest": KVManifest(groups=(GROUP,))}, "KV group 0 with layers"),
        ({"scratch_bytes": 7}, "another size of scratch memory"),
    ],
)
def test_why_no_block_can_be_copied_to_a_peer(change: dict[str, Any], problem: str) -> None:
    own = peer_info("d")
    own.check_pair(peer_info("p"))
    with pytest.raises(TransferError, match=problem):
        own.check_pair(msgspec.structs.replace(peer_info("p"), **change))


def test_work_to_read_a_peer_info_does_not_grow_with_stages_times_layers() -> None:
    """Regression: 126 kB of peer info took 8 s of the thread that steps the engine."""

    def work(num_stages: int) -> int:
        many = msgspec.structs.replace(GROUP, num_places=2000, layers=(0,) * 2000)
        info = msgspec.structs.replace(
            peer_info("p"),
            manifest=KVManifest(groups=(many,) * 4, num_ranks=num_stages, num_stages=num_stages),
            ranks=(RankMemory(),) * num_stages,
        )
        blob = info.encode()
        return count_lines(lambda: PeerInfo.decode(blob))

    per_stage = (work(101) - work(1)) / 100
    assert per_stage < 10


def test_a_record_of_another_version_ends_its_transfer() -> None:
    machine = ReceiveMachine(peer_info("d"))
    p = peer_info("p")
    machine.handle_input(Meet(p), 0.0)
    machine.handle_input(ConnectEnded(Connect(p), path="scripted"), 0.0)
    later = HandoffRecord(num_tokens=1, token_id=1, version=HANDOFF_VERSION + 1)
    actions = machine.handle_input(msgspec.structs.replace(COMMIT, record=later), 0.1)
    [event] = [action for action in actions if isinstance(action, TransferEvent)]
    assert event.kind is TransferEventKind.FAILED
    assert event.reason == "the hand-off record has version 2, not 1"
    actions = machine.handle_input(COMMIT, 0.1)
    [event] = [action for action in actions if isinstance(action, TransferEvent)]
    assert (event.kind, event.record) == (TransferEventKind.COMMITTED, COMMIT.record)


def test_fields_of_a_record_that_are_not_known_are_ignored() -> None:
    said = msgspec.msgpack.decode(encode(COMMIT))
    said["record"]["drafts"] = [1, 2, 3]
    assert decode(msgspec.msgpack.encode(said)) == COMMIT
