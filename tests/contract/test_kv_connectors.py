"""One suite for every registered KV connector: what arrives, where, in what order, and how it ends.

Sender and receiver run on their own I/O threads, as in the nodes; the tests wait for events.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from kvconnector import KV_CONNECTORS
from kvconnector.base import BlockPush, KVReservation, TransferEvent, TransferEventKind
from kvconnector.receiver import Receiver
from kvconnector.sender import Sender
from tests.fakes.waiting import wait_until

BLOCK_SHAPE = (2, 2, 2, 4, 8)  # layers, k and v, heads, tokens, head_dim
BLOCK_SIZE = BLOCK_SHAPE[3]
NUM_P_BLOCKS, NUM_D_BLOCKS = 12, 16
UNTOUCHED = -1.0
_numbers = itertools.count()

Kind = TransferEventKind
CONNECTORS = [
    pytest.param(name, marks=[pytest.mark.nixl] if name.startswith("nixl") else [])
    for name in KV_CONNECTORS.names()
]


@dataclass
class Link:
    """A connected sender and receiver, their memories, and all events so far."""

    sender: Sender
    receiver: Receiver
    source: torch.Tensor
    target: torch.Tensor
    sent: list[TransferEvent] = field(default_factory=list)
    received: list[TransferEvent] = field(default_factory=list)

    def poll(self) -> None:
        self.sent += self.sender.poll()
        self.received += self.receiver.poll()

    @property
    def p(self) -> str:
        return self.sender.peer_info.engine_id

    @property
    def d(self) -> str:
        return self.receiver.peer_info.engine_id

    def events(self, side: str, kind: Kind, request_id: str = "") -> list[TransferEvent]:
        found = self.sent if side == "p" else self.received
        return [e for e in found if e.kind is kind and request_id in ("", e.request_id)]

    def wait(self, side: str, kind: Kind, request_id: str = "", count: int = 1) -> TransferEvent:
        """The ``count``-th such event, when it has come."""

        def came() -> bool:
            self.poll()
            return len(self.events(side, kind, request_id)) >= count

        wait_until(came, f"{kind} {count} of {request_id!r} at {side}")
        return self.events(side, kind, request_id)[count - 1]

    def start(self, request_id: str, num_tokens: int, epoch: int = 0) -> None:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.sender.start(request_id, epoch, self.d, num_tokens=num_tokens, num_blocks=num_blocks)

    def grant(
        self, request_id: str, block_ids: tuple[int, ...], epoch: int = 0, first_block: int = 0
    ) -> None:
        self.receiver.grant(
            KVReservation(
                request_id=request_id,
                epoch=epoch,
                engine_id=self.p,
                block_ids=block_ids,
                first_block=first_block,
            )
        )

    def push(
        self,
        request_id: str,
        first_block: int,
        block_ids: tuple[int, ...],
        num_tokens: int,
        token_id: int | None = None,
        epoch: int = 0,
    ) -> None:
        self.sender.push(
            BlockPush(
                request_id=request_id,
                epoch=epoch,
                first_block=first_block,
                block_ids=block_ids,
                num_tokens=num_tokens,
                token_id=token_id,
            )
        )

    def assert_arrived(self, moves: dict[int, int]) -> None:
        """Source block -> target block; every other target block is as it was."""
        for source_id, target_id in moves.items():
            assert torch.equal(self.target[target_id], self.source[source_id])
        for block_id in set(range(NUM_D_BLOCKS)) - set(moves.values()):
            assert (self.target[block_id] == UNTOUCHED).all(), f"block {block_id} was written"


@pytest.fixture(params=CONNECTORS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    make_transport = KV_CONNECTORS.load(request.param)
    number = next(_numbers)  # an engine id is never used twice
    source = torch.rand(NUM_P_BLOCKS, *BLOCK_SHAPE)
    target = torch.full((NUM_D_BLOCKS, *BLOCK_SHAPE), UNTOUCHED)
    deaths: list[Exception] = []
    receiver = Receiver(make_transport(f"d{number}-contract", target), lambda: None, deaths.append)
    sender = Sender(make_transport(f"p{number}-contract", source), lambda: None, deaths.append)
    made = Link(sender, receiver, source, target)
    receiver.expect(True)
    receiver.connect(sender.peer_info)
    sender.connect(receiver.peer_info)
    made.wait("p", Kind.PEER_CONNECTED)
    made.wait("d", Kind.PEER_CONNECTED)
    yield made
    sender.close()
    receiver.close()
    assert deaths == []  # no I/O thread met what it did not expect


def test_both_sides_learn_that_they_are_connected_and_by_which_path(link: Link) -> None:
    assert link.events("p", Kind.PEER_CONNECTED)[0].engine_id == link.d
    assert link.events("d", Kind.PEER_CONNECTED)[0].engine_id == link.p
    assert link.events("p", Kind.PEER_CONNECTED)[0].transport
    assert link.events("d", Kind.PEER_CONNECTED)[0].transport


def test_blocks_arrive_where_they_were_granted_and_nowhere_else(link: Link) -> None:
    link.start("a", 10)
    started = link.wait("d", Kind.STARTED)
    assert (started.request_id, started.num_tokens, started.engine_id) == ("a", 10, link.p)
    link.grant("a", (9, 3, 15))
    link.push("a", 0, (4, 0, 11), 10, token_id=77)
    committed = link.wait("d", Kind.COMMITTED)
    link.assert_arrived({4: 9, 0: 3, 11: 15})  # the data is there when the record is
    assert (committed.token_id, committed.num_tokens) == (77, 10)
    assert committed.receipt is not None
    assert committed.receipt.num_blocks == 3
    assert committed.receipt.num_bytes == 3 * link.source[0].nbytes
    assert committed.receipt.exposed_transfer_s >= 0
    link.wait("p", Kind.COMMITTED)


def test_one_block_of_one_token_is_handed_over(link: Link) -> None:
    link.start("a", 1)
    link.wait("d", Kind.STARTED)
    link.grant("a", (0,))
    link.push("a", 0, (NUM_P_BLOCKS - 1,), 1, token_id=0)
    assert link.wait("d", Kind.COMMITTED).token_id == 0
    link.assert_arrived({NUM_P_BLOCKS - 1: 0})


def test_chunks_that_were_pushed_before_the_grant_travel_when_it_comes(link: Link) -> None:
    link.start("a", 12)
    link.push("a", 0, (1,), 4)
    link.push("a", 1, (2,), 8)
    link.wait("d", Kind.STARTED)
    link.assert_arrived({})
    link.grant("a", (5, 6, 7))
    assert link.wait("d", Kind.WATERMARK, count=2).num_tokens == 8
    link.assert_arrived({1: 5, 2: 6})
    link.push("a", 2, (3,), 12, token_id=1)
    link.wait("d", Kind.COMMITTED)
    link.assert_arrived({1: 5, 2: 6, 3: 7})


def test_a_watermark_comes_after_each_chunk_and_never_before_its_bytes(link: Link) -> None:
    link.start("a", 16)
    link.wait("d", Kind.STARTED)
    link.grant("a", (5, 6, 7, 8))
    moves = {}
    for index in range(3):
        link.push("a", index, (index,), (index + 1) * BLOCK_SIZE)
        mark = link.wait("d", Kind.WATERMARK, count=index + 1)
        moves[index] = 5 + index
        assert mark.num_tokens == (index + 1) * BLOCK_SIZE
        link.assert_arrived(moves)
    assert not link.events("d", Kind.COMMITTED)
    link.push("a", 3, (3,), 14, token_id=1)
    link.wait("d", Kind.COMMITTED)


def test_a_last_push_without_blocks_commits_what_has_arrived(link: Link) -> None:
    link.start("a", 4)
    link.wait("d", Kind.STARTED)
    link.grant("a", (2,))
    link.push("a", 0, (1,), 4)
    link.wait("d", Kind.WATERMARK)
    link.push("a", 1, (), 4, token_id=6)
    assert link.wait("d", Kind.COMMITTED).token_id == 6
    link.assert_arrived({1: 2})


@pytest.mark.parametrize("first_block", range(5))
@pytest.mark.parametrize("early", [True, False])
def test_blocks_that_the_decode_node_has_do_not_travel(
    link: Link, first_block: int, early: bool
) -> None:
    """A push may lie before, across or behind the first block that is granted."""
    sources, targets = (0, 2, 4, 6), (9, 3, 15, 7)
    link.start("a", 16)
    link.wait("d", Kind.STARTED)
    if early:
        link.grant("a", targets[first_block:], first_block=first_block)
    link.push("a", 0, sources[:3], 12)
    link.push("a", 3, sources[3:], 16, token_id=6)
    if not early:
        link.grant("a", targets[first_block:], first_block=first_block)
    receipt = link.wait("d", Kind.COMMITTED).receipt
    link.assert_arrived(dict(zip(sources[first_block:], targets[first_block:], strict=True)))
    assert receipt is not None
    assert receipt.num_blocks == 4 - first_block
    assert (receipt.num_bytes == 0) == (first_block == 4)


@pytest.mark.parametrize(("first_block", "num_blocks"), [(1, 4), (5, 0), (2**31 - 1, 4), (3, 0)])
def test_a_grant_that_leaves_out_or_adds_blocks_fails_the_transfer(
    link: Link, first_block: int, num_blocks: int
) -> None:
    link.start("a", 16)
    link.wait("d", Kind.STARTED)
    link.grant("a", tuple(range(num_blocks)), first_block=first_block)
    link.push("a", 0, (0, 2, 4, 6), 16, token_id=6)
    assert "bad grant" in link.wait("p", Kind.FAILED).reason
    link.wait("d", Kind.FAILED)
    link.assert_arrived({})


def test_nothing_is_committed_before_the_grant_even_if_all_was_pushed(link: Link) -> None:
    link.start("a", 4)
    link.push("a", 0, (1,), 4, token_id=6)
    link.wait("d", Kind.STARTED)
    full_exchange(link, "b", 0, 0)  # whatever the threads had to do, they have done it by now
    assert not link.events("d", Kind.COMMITTED, "a")
    assert not link.events("p", Kind.COMMITTED, "a")
    link.grant("a", (1,))
    link.wait("d", Kind.COMMITTED, "a")


def full_exchange(
    link: Link, request_id: str, source_id: int, target_id: int, epoch: int = 0
) -> None:
    """One block from start to commit, on both sides."""
    ends = [len(link.events(side, Kind.COMMITTED, request_id)) for side in "pd"]
    starts = len(link.events("d", Kind.STARTED, request_id))
    link.start(request_id, 4, epoch)
    link.wait("d", Kind.STARTED, request_id, starts + 1)
    link.grant(request_id, (target_id,), epoch)
    link.push(request_id, 0, (source_id,), 4, token_id=1, epoch=epoch)
    link.wait("d", Kind.COMMITTED, request_id, ends[1] + 1)
    link.wait("p", Kind.COMMITTED, request_id, ends[0] + 1)


@pytest.mark.parametrize(
    ("block_ids", "reason"),
    [
        ((1, 2), "2 blocks, wanted 3"),
        ((1, 2, 3, 4), "4 blocks, wanted 3"),
        ((), "0 blocks, wanted 3"),
        ((1, 2, NUM_D_BLOCKS), "block ids must be 0 to"),
        ((1, -1, 2), "block ids must be 0 to"),
    ],
)
def test_a_grant_that_does_not_fit_fails_the_transfer_and_writes_nothing(
    link: Link, block_ids: tuple[int, ...], reason: str
) -> None:
    link.start("a", 12)
    link.wait("d", Kind.STARTED)
    link.push("a", 0, (1, 2, 3), 12, token_id=1)
    link.grant("a", block_ids)
    assert reason in link.wait("p", Kind.FAILED).reason
    assert reason in link.wait("d", Kind.FAILED).reason
    link.assert_arrived({})
    full_exchange(link, "b", 5, 5)  # the connector itself is none the worse
    link.assert_arrived({5: 5})


def test_a_second_grant_changes_nothing(link: Link) -> None:
    link.start("a", 8)
    link.wait("d", Kind.STARTED)
    link.grant("a", (1, 2))
    link.grant("a", (3, 4))
    link.push("a", 0, (1, 2), 8, token_id=1)
    link.wait("d", Kind.COMMITTED)
    link.assert_arrived({1: 1, 2: 2})


def test_a_grant_for_an_unknown_request_is_answered_so_that_its_blocks_come_back(
    link: Link,
) -> None:
    link.grant("nobody", (1,))
    assert link.wait("d", Kind.FAILED, "nobody").reason == "unknown"
    assert link.events("p", Kind.FAILED) == []


def test_when_the_receiver_cancels_both_sides_end_once_and_no_later_push_is_written(
    link: Link,
) -> None:
    link.start("a", 8)
    link.wait("d", Kind.STARTED)
    link.grant("a", (1, 2))
    link.push("a", 0, (1,), 4)
    link.wait("d", Kind.WATERMARK)
    link.receiver.cancel("a", 0, link.p)
    for side in "dp":
        assert not link.wait(side, Kind.FAILED, "a").reason  # who cancelled knows why
    link.push("a", 1, (2,), 8, token_id=1)
    full_exchange(link, "b", 7, 7)
    link.assert_arrived({1: 1, 7: 7})
    assert len(link.events("p", Kind.FAILED, "a")) == 1
    assert not link.events("d", Kind.COMMITTED, "a")


def test_a_cancel_before_the_grant_ends_the_transfer(link: Link) -> None:
    link.start("a", 8)
    link.push("a", 0, (1, 2), 8, token_id=1)
    link.wait("d", Kind.STARTED)
    link.receiver.cancel("a", 0, link.p)
    link.wait("d", Kind.FAILED, "a")
    link.wait("p", Kind.FAILED, "a")
    link.grant("a", (1, 2))  # too late
    link.wait("d", Kind.FAILED, "a", count=2)
    link.assert_arrived({})


def test_a_cancel_of_what_is_over_is_answered_and_harmless(link: Link) -> None:
    full_exchange(link, "a", 1, 1)
    link.receiver.cancel("a", 0, link.p)
    assert link.wait("d", Kind.FAILED, "a").reason == "unknown"
    assert not link.events("p", Kind.FAILED, "a")


def test_when_the_sender_aborts_the_receiver_hears_why(link: Link) -> None:
    link.start("a", 8)
    link.wait("d", Kind.STARTED)
    link.grant("a", (1, 2))
    link.push("a", 0, (1,), 4)
    link.sender.abort("a", 0, "out of luck")
    assert link.wait("d", Kind.FAILED, "a").reason == "out of luck"
    assert link.wait("p", Kind.FAILED, "a").reason == "out of luck"
    link.push("a", 1, (2,), 8, token_id=1)
    full_exchange(link, "b", 7, 7)
    assert (link.target[2] == UNTOUCHED).all()


def test_aborting_what_is_not_there_is_harmless(link: Link) -> None:
    link.sender.abort("nobody", 0, "x")
    full_exchange(link, "a", 1, 1)
    assert not link.events("p", Kind.FAILED)


def test_two_requests_do_not_mix_when_their_chunks_take_turns(link: Link) -> None:
    for name in ("a", "b"):
        link.start(name, 12)
        link.wait("d", Kind.STARTED, name)
    link.grant("a", (0, 2, 4))
    link.grant("b", (1, 3, 5))
    for index in range(3):
        for offset, name in enumerate(("a", "b")):
            token_id = 50 + offset if index == 2 else None
            link.push(name, index, (index + 6 * offset,), (index + 1) * 4, token_id)
    assert link.wait("d", Kind.COMMITTED, "a").token_id == 50
    assert link.wait("d", Kind.COMMITTED, "b").token_id == 51
    link.assert_arrived({0: 0, 1: 2, 2: 4, 6: 1, 7: 3, 8: 5})


def test_two_epochs_of_one_request_are_two_transfers(link: Link) -> None:
    link.start("a", 4, epoch=1)
    link.start("a", 4, epoch=2)
    link.wait("d", Kind.STARTED, "a", count=2)
    link.grant("a", (1,), epoch=1)
    link.grant("a", (2,), epoch=2)
    link.push("a", 0, (5,), 4, token_id=10, epoch=1)
    link.sender.abort("a", 3, "an epoch that never was")
    link.receiver.cancel("a", 2, link.p)
    committed = link.wait("d", Kind.COMMITTED, "a")
    assert (committed.epoch, committed.token_id) == (1, 10)
    assert link.wait("d", Kind.FAILED, "a").epoch == 2
    assert link.wait("p", Kind.FAILED, "a").epoch == 2
    link.assert_arrived({5: 1})


def test_when_the_decode_node_is_gone_its_transfers_fail_and_others_are_not_started(
    link: Link,
) -> None:
    link.start("a", 8)
    link.wait("d", Kind.STARTED)
    link.grant("a", (1, 2))
    link.push("a", 0, (1,), 4)
    link.wait("d", Kind.WATERMARK)
    link.sender.disconnect(link.d)
    assert "gone" in link.wait("p", Kind.FAILED, "a").reason
    link.start("b", 4)
    assert "cannot be reached" in link.wait("p", Kind.FAILED, "b").reason
    assert len(link.events("p", Kind.FAILED)) == 2


def test_a_peer_that_was_disconnected_can_be_met_again(link: Link) -> None:
    link.sender.disconnect(link.d)
    link.receiver.disconnect(link.p)
    link.receiver.connect(link.sender.peer_info)
    link.sender.connect(link.receiver.peer_info)
    link.wait("p", Kind.PEER_CONNECTED, count=2)
    link.wait("d", Kind.PEER_CONNECTED, count=2)
    full_exchange(link, "a", 3, 4)
    link.assert_arrived({3: 4})


def test_many_requests_at_once_all_arrive_right(link: Link) -> None:
    for round_number in range(4):
        names = [f"r{round_number}-{i}" for i in range(NUM_P_BLOCKS)]
        link.source.copy_(torch.rand_like(link.source))
        for index, name in enumerate(names):
            link.start(name, 4)
            link.push(name, 0, (index,), 4, token_id=index)
        for index, name in enumerate(names):
            link.wait("d", Kind.STARTED, name)
            link.grant(name, ((index * 5 + round_number) % NUM_D_BLOCKS,))
        for index, name in enumerate(names):
            assert link.wait("d", Kind.COMMITTED, name).token_id == index
            link.wait("p", Kind.COMMITTED, name)
            target = (index * 5 + round_number) % NUM_D_BLOCKS
            assert torch.equal(link.target[target], link.source[index])


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_peer_of_another_connector_is_refused(name: str) -> None:
    make_transport = KV_CONNECTORS.load(name)
    number = next(_numbers)
    deaths: list[Exception] = []
    sender = Sender(
        make_transport(f"p{number}-contract", torch.zeros(2, *BLOCK_SHAPE)),
        lambda: None,
        deaths.append,
    )
    stranger = msgspec.structs.replace(sender.peer_info, connector="pigeon", engine_id="x")
    sender.connect(stranger)
    events: list[TransferEvent] = []

    def failed() -> bool:
        events.extend(sender.poll())
        return bool(events)

    wait_until(failed)
    sender.close()
    assert [event.kind for event in events] == [Kind.PEER_FAILED]
    assert events[0].reason
    assert deaths == []
