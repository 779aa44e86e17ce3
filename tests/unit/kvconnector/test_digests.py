"""Tests of digests: every damaged block is found and requested again, and none is used."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from baton.api.errors import TransferError
from baton.api.sampling_params import SamplingParams
from baton.kv.block_key import BlockKey
from kvconnector.base import (
    NO_TRANSFER,
    BlockPush,
    HandoffRecord,
    KVReservation,
    TransferEvent,
    TransferEventKind,
    TransferKey,
)
from kvconnector.block_digests import BlockDigests, digests_are_wanted
from kvconnector.blocks import LayerRange, Slices
from kvconnector.ends import Receiver, Sender
from kvconnector.protocol.actions import Action, Drop, Input, Posted, Send, Write, WriteEnded
from kvconnector.protocol.digests import DigestTeller, SentDigests, Written
from kvconnector.protocol.messages import Digests, Verified, Watermark, decode, encode
from kvconnector.protocol.seals import Channels, peek
from kvconnector.protocol.transfer import MAX_ATTEMPTS, Piece
from kvconnector.transports.in_memory import InMemoryTransport, _Done
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.handoff.peer_infos import peer_info
from tests.fakes.time.waiting import wait_until
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

NUM_BLOCKS = 8
DIGEST = b"1234567812345678"
BLOCK_SHAPE = (4, 2, 2, 4, 8)  # layers, k and v, heads, tokens, head_dim
OTHER_BLOCKS = range(2, NUM_BLOCKS)  # blocks of the sender; the first two are sent
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
Kind = TransferEventKind


class DamagingTransport(InMemoryTransport):
    """Damages one block of each write until ``num_damages`` blocks are damaged.

    The damages take turns: one bit is flipped, the block is cut short, another block's bytes
    replace it.
    """

    draw = random.Random(0)
    num_damages = num_damages_made = 0
    num_writes = 0

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> _Done:
        done = super().write(engine_id, local_block_ids, remote_block_ids, layers)
        self.num_writes += 1
        if self.num_damages:
            self.num_damages -= 1
            block = self._end(engine_id)._bytes[self.draw.choice(remote_block_ids)]
            size = len(block) // BLOCK_SHAPE[0]
            first, end = layers or (0, BLOCK_SHAPE[0])
            first, end = first * size, end * size
            kind = self.num_damages_made = self.num_damages_made + 1
            if kind % 3 == 0:
                block[self.draw.randrange(first, end)] ^= 1 << self.draw.randrange(8)
            elif kind % 3 == 1:  # the bytes of an element of a random tensor are never all zero
                block[self.draw.randrange(first, end - 4) : end] = 0
            else:
                other = self._bytes[self.draw.choice(OTHER_BLOCKS)]
                block[first:end] = other[first:end]
        return done


class Pair:
    """A sender that damages and a receiver that checks, in threads of their own."""

    def __init__(self) -> None:
        self.source = torch.rand(NUM_BLOCKS, *BLOCK_SHAPE)
        self.target = torch.zeros(NUM_BLOCKS, *BLOCK_SHAPE)
        self.transport = DamagingTransport("p-digests", memory_of(self.source))
        deaths = self.deaths = list[Exception]()
        self.receiver = Receiver(
            InMemoryTransport("d-digests", memory_of(self.target)),
            lambda: None,
            deaths.append,
            digests=BlockDigests(memory_of(self.target)),
        )
        self.sender = Sender(
            self.transport,
            lambda: None,
            deaths.append,
            digests=BlockDigests(memory_of(self.source)),
        )
        self.sender.loop.start()
        self.receiver.loop.start()
        self.receiver.expect(True)
        self.receiver.connect(self.sender.peer_info)
        self.sender.connect(self.receiver.peer_info)
        self.sent: list[TransferEvent] = []
        self.received: list[TransferEvent] = []
        self.wait(self.received, Kind.PEER_CONNECTED, "")

    def wait(self, events: list[TransferEvent], kind: Kind, request_id: str) -> TransferEvent:
        def found() -> list[TransferEvent]:
            self.sent += self.sender.poll()
            self.received += self.receiver.poll()
            return [e for e in events if e.kind is kind and e.request_id == request_id]

        wait_until(found, f"{kind} of {request_id}")
        return found()[0]

    def hand_over(self, name: str, layers: Sequence[LayerRange | None]) -> None:
        """Hand two blocks over, the second one layer by layer."""
        self.sender.start(name, 0, "d-digests", num_tokens=8, num_blocks=2)
        self.wait(self.received, Kind.STARTED, name)
        first, second = random.Random(name).sample(range(NUM_BLOCKS), 2)
        self.receiver.grant(
            KVReservation(
                request_id=name, epoch=0, engine_id="p-digests", block_ids=(first, second)
            )
        )
        push = BlockPush(request_id=name, epoch=0, first_block=0, block_ids=(0,), num_tokens=4)
        self.sender.push(push)
        for part in layers:
            self.sender.push(
                BlockPush(request_id=name, epoch=0, first_block=1, block_ids=(1,), layers=part)
            )
        self.sender.push(
            BlockPush(
                request_id=name,
                epoch=0,
                first_block=2,
                block_ids=(),
                num_tokens=8,
                record=HandoffRecord(num_tokens=8, token_id=5),
            )
        )

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        assert self.deaths == []


@pytest.mark.parametrize(
    "num_transfers",
    [pytest.param(1000, marks=pytest.mark.medium), pytest.param(6700, marks=pytest.mark.large)],
)
def test_all_of_many_random_damages_are_found_and_made_good(num_transfers: int) -> None:
    pair = Pair()
    by_layers = [(0, 1), (1, 3), (3, 4)]
    for number in range(num_transfers):
        pair.transport.num_damages = num_damages = 1 + number % 2
        num_writes = pair.transport.num_writes + 1 + num_damages
        name = f"r{number}"
        parts = by_layers if number % 3 else [None]
        pair.hand_over(name, parts)
        pair.wait(pair.received, Kind.COMMITTED, name)
        assert pair.transport.num_writes == num_writes + len(parts)  # each damage costs one
        first, second = random.Random(name).sample(range(NUM_BLOCKS), 2)
        assert torch.equal(pair.target[[first, second]], pair.source[[0, 1]])
        pair.wait(pair.sent, Kind.COMMITTED, name)
        pair.target.zero_()
        pair.sent.clear()
        pair.received.clear()
    assert pair.transport.num_damages_made == num_transfers * 3 // 2
    pair.close()


def test_blocks_that_a_rank_could_not_compare_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare, num_failures = BlockDigests.of, 2

    def stumble(
        self: BlockDigests,
        block_ids: Sequence[int],
        written: Written,
        key: BlockKey,
        slices: Slices | None = None,
        *,
        writes: bool = True,
    ) -> bytes:
        nonlocal num_failures
        if not writes and num_failures:
            num_failures -= 1
            raise TransferError("the transport of rank 1 does not answer")
        return compare(self, block_ids, written, key, slices, writes=writes)

    monkeypatch.setattr(BlockDigests, "of", stumble)
    pair = Pair()
    pair.hand_over("a", [None])
    pair.wait(pair.received, Kind.COMMITTED, "a")
    assert not num_failures
    pair.close()


def test_what_stays_wrong_fails_after_a_few_attempts_and_was_never_committed() -> None:
    pair = Pair()
    pair.transport.num_damages = 10**6
    pair.hand_over("a", [None])
    reason = f"digests of KV blocks were wrong after {MAX_ATTEMPTS} attempts"
    assert pair.wait(pair.received, Kind.FAILED, "a").reason == reason
    assert pair.wait(pair.sent, Kind.FAILED, "a").reason == reason
    kinds = {event.kind for event in pair.received if event.request_id == "a"}
    assert kinds == {Kind.STARTED, Kind.FAILED}  # no watermark either
    pair.transport.num_damages = 0
    pair.hand_over("b", [None])
    pair.wait(pair.received, Kind.COMMITTED, "b")
    pair.close()


def go_on(cluster: Cluster) -> None:
    for engine_id in "pd":
        cluster.step(engine_id)
        cluster.round(engine_id)


def test_a_watermark_waits_for_the_digests_that_it_overtook() -> None:
    cluster = make_cluster(20, kv_digests=True)
    prompt = prompt_of(0, 14)
    cluster.place("a", 1, prompt, GREEDY)
    cluster.step("d")
    cluster.step("p")
    for engine_id in "pddp":  # it is granted before the second chunk
        cluster.round(engine_id)
        cluster.step("d")
        while cluster.network.messages:
            cluster.network.deliver(0)
    while cluster.network.writes:
        cluster.network.land(0)
    cluster.round("p")
    kinds = [type(peek(message.payload)) for message in cluster.network.messages]
    assert kinds == [Digests, Watermark]
    cluster.network.deliver(kinds.index(Watermark))
    cluster.round("d")
    assert Kind.WATERMARK not in [event.kind for event in cluster.receiver.heard]
    cluster.settle()
    assert Kind.WATERMARK in [event.kind for event in cluster.receiver.heard]
    assert tuple(cluster.attempts["a", 1].tokens.values()) == reference_tokens(
        tuple(prompt), GREEDY
    )
    assert_clean(cluster)


def test_the_prefill_node_holds_its_blocks_until_all_is_verified() -> None:
    cluster = make_cluster(20, kv_digests=True)
    cluster.place("a", 1, prompt_of(0, 14), GREEDY)
    for _ in range(60):
        go_on(cluster)
        while cluster.network.writes:
            cluster.network.land(0)
        for index, message in enumerate(cluster.network.messages):
            if isinstance(peek(message.payload), Verified):
                assert cluster.p.requests() != []
                cluster.network.drop(index)  # it is lost: until the commit is said again
                break
        while cluster.network.messages:
            cluster.network.deliver(0)
    assert cluster.attempts["a", 1].is_complete
    assert cluster.p.requests() != []
    cluster.settle()
    assert cluster.p.requests() == []
    assert_clean(cluster)


@pytest.mark.parametrize(
    "message",
    [
        Digests(engine_id="p", request_id="a", epoch=1, indices=[98, 99], digests=b"x" * 32),
        Digests(engine_id="p", request_id="a", epoch=1, indices=[0], digests=b"short"),
        Digests(
            engine_id="p",
            request_id="a",
            epoch=1,
            indices=[0],
            digests=DIGEST,
            attempt=7,
        ),
        Digests(
            engine_id="p",
            request_id="a",
            epoch=1,
            indices=[0],
            digests=DIGEST,
            layers=(0, 99),
        ),
        Digests(engine_id="p", request_id="nobody", epoch=1, indices=[0], digests=DIGEST),
    ],
)
def test_digests_that_fit_nothing_are_data(message: Digests) -> None:
    assert decode(encode(message)) == message
    cluster = make_cluster(20, kv_digests=True)
    cluster.place("a", 1, prompt_of(0, 14), GREEDY)
    for _ in range(6):
        go_on(cluster)
        assert cluster.receiver.verifier is not None
        cluster.receiver.verifier.handle_input(message, cluster.clock())
        while cluster.network.messages:
            cluster.network.deliver(0)
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert_clean(cluster)


WRITTEN = Written("a", 1, (0, 1), (0, 4), 0, (10, 11))


@pytest.mark.parametrize(
    "other",
    [
        Written("b", 1, (0, 1), (0, 4), 0, (10, 11)),
        Written("a", 2, (0, 1), (0, 4), 0, (10, 11)),
        Written("a", 1, (2, 3), (0, 4), 0, (10, 11)),
        Written("a", 1, (0, 1), (0, 4), 1, (10, 11)),
        Written("a", 1, (0, 1), (0, 4), 0, (12, 13)),
    ],
)
def test_the_same_bytes_written_as_anything_else_have_other_digests(other: Written) -> None:
    cache = torch.rand(NUM_BLOCKS, *BLOCK_SHAPE)
    digests, key = BlockDigests(memory_of(cache)), BlockKey(bytes(32))
    right = digests.of([3, 5], WRITTEN, key)
    assert right == digests.of([3, 5], WRITTEN, key)
    wrong = digests.of([3, 5], other, key)
    assert wrong[:16] != right[:16]
    assert wrong[16:] != right[16:]


def test_digests_depend_on_key_bytes_and_layers() -> None:
    cache = torch.zeros(NUM_BLOCKS, *BLOCK_SHAPE)
    digests, key = BlockDigests(memory_of(cache)), BlockKey(bytes(32))
    whole = Written("a", 1, (0,), (0, 4), 0, (10,))
    right = digests.of([3], whole, key)
    assert digests.of([4], whole, key) == right  # the same bytes elsewhere in memory
    assert digests.of([3], whole, BlockKey(b"x" * 32)) != right
    part = Written("a", 1, (0,), (0, 3), 0, (10,))
    of_part = digests.of([3], part, key)
    cache[3, 3] = 1.0
    assert digests.of([3], part, key) == of_part
    assert digests.of([3], whole, key) != right


class WritesOnly:
    """A sender that wants these writes, one after the other."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._left = list(writes)

    def handle_input(self, item: Input, now: float) -> list[Action]:
        del now
        is_next = not isinstance(item, WriteEnded) and self._left
        return [self._left.pop(0)] if is_next else []

    def tick(self, now: float) -> list[Action]:
        del now
        return []


def test_digests_of_a_write_that_was_not_posted_are_not_told_for_the_one_before() -> None:
    """Regression: the decode node found unwritten blocks wrong, and blamed the memory."""
    key = ("a", 1)
    writes = [Write("d", key, Piece((place,), (place,)), [place]) for place in range(3)]
    channels, theirs = Channels("p"), Channels("d")
    channels.learn(peer_info("d", public_key=theirs.public_key))
    memory = memory_of(torch.rand(NUM_BLOCKS, *BLOCK_SHAPE))
    teller = DigestTeller(WritesOnly(writes), SentDigests(BlockDigests(memory), "p"), channels)
    teller.handle_input(Drop(key, "d"), 0)  # anything
    teller.handle_input(Posted(writes[0]), 0)
    teller.handle_input(Posted(writes[1]), 0)
    assert teller.handle_input(Posted(writes[2], problem="the link is down"), 0) == []
    told = [teller.handle_input(WriteEnded("d", key), 0) for _ in range(2)]
    said = [action.message for actions in told for action in actions if isinstance(action, Send)]
    assert [list(one.indices) for one in said if isinstance(one, Digests)] == [[0], [1]]


def test_no_number_is_used_twice() -> None:
    digester = SentDigests(BlockDigests(memory_of(torch.zeros(NUM_BLOCKS, *BLOCK_SHAPE))), "p")
    key, piece = BlockKey(bytes(32)), Piece((0, 1, 2), (5, 6, 7))
    again = Piece((0,), (5,), (0, 2), attempt=1)
    writes = [Write("d", ("a", 1), one, one.block_ids) for one in (piece, piece, piece, again)]
    messages = [digester.of(write, key) for write in writes]
    assert [m.first_number for m in messages] == [0, 3, 6, 9]
    pieces = [m.digests[at : at + 16] for m in messages for at in range(0, len(m.digests), 16)]
    assert len(set(pieces)) == 10  # of equal bytes, too


@pytest.mark.parametrize(
    ("option", "connector", "devices", "wanted"),
    [
        (None, "nixl", None, False),
        (None, "nixl", "lo", False),
        (None, "nixl", "eth0", True),
        (None, "nixl", "lo,mlx5_0:1", True),
        (None, "in_memory", "eth0", False),
        (True, "in_memory", None, True),
        (False, "nixl", "eth0", False),
    ],
)
def test_blocks_are_checked_where_they_leave_loopback_unless_the_operator_says(
    option: bool | None,
    connector: str,
    devices: str | None,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", devices)
    assert digests_are_wanted(option, connector) is wanted
