"""Contract of every KV connector, on real I/O threads: the bytes that arrive, and the end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from baton.testing.transports import BLOCK_SHAPE, BLOCK_SIZE, UNTOUCHED
from kvconnector import KV_CONNECTORS
from kvconnector.base import HandoffRecord, TransferEvent
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.faults import FaultSpec, FaultyTransport
from tests.fakes.handoff.kv_link import CONNECTORS, NUM_D_BLOCKS, NUM_P_BLOCKS, Kind, Link, numbers
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium


def test_both_sides_learn_that_they_are_connected_and_by_which_path(link: Link) -> None:
    assert link.events("p", Kind.PEER_CONNECTED)[0].engine_id == link.d
    assert link.events("d", Kind.PEER_CONNECTED)[0].engine_id == link.p
    assert link.events("p", Kind.PEER_CONNECTED)[0].transport
    assert link.events("d", Kind.PEER_CONNECTED)[0].transport


def test_both_sides_learn_how_fast_the_self_test_was_which_has_written_no_kv(link: Link) -> None:
    rates = {link.events(side, Kind.PEER_CONNECTED)[0].bandwidth_bytes_per_s for side in "pd"}
    assert len(rates) == 1
    assert 0 < rates.pop() < 1e13
    assert not link.events("p", Kind.PEER_FAILED)
    link.assert_arrived({})


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_pair_whose_self_test_arrives_wrong_is_not_connected_and_both_say_why(name: str) -> None:
    make_transport = KV_CONNECTORS.load(name)
    number = next(numbers)
    deaths: list[Exception] = []
    caches = torch.zeros(NUM_P_BLOCKS, *BLOCK_SHAPE), torch.zeros(NUM_D_BLOCKS, *BLOCK_SHAPE)
    spec = FaultSpec(corrupt_test=1)
    faulty = FaultyTransport(
        make_transport(f"d{number}-contract", memory_of(caches[1])), memory_of(caches[1]), spec
    )
    receiver = Receiver(faulty, lambda: None, deaths.append)
    transport = make_transport(f"p{number}-contract", memory_of(caches[0]))
    sender = Sender(transport, lambda: None, deaths.append)
    link = Link(sender, receiver, *caches)
    sender.loop.start()
    receiver.loop.start()
    receiver.connect(sender.peer_info)
    sender.connect(receiver.peer_info)
    for side in "pd":
        assert "arrived wrong" in link.wait(side, Kind.PEER_FAILED).reason
        assert not link.events(side, Kind.PEER_CONNECTED)
    faulty._spec = FaultSpec()  # it is tried again and again
    for side in "pd":
        assert link.wait(side, Kind.PEER_CONNECTED).bandwidth_bytes_per_s > 0
        assert len(link.events(side, Kind.PEER_FAILED)) == 1
    sender.close()
    receiver.close()
    assert deaths == []


def test_blocks_arrive_where_they_were_granted_and_nowhere_else(link: Link) -> None:
    link.start("a", 10)
    started = link.wait("d", Kind.STARTED)
    assert (started.request_id, started.num_tokens, started.engine_id) == ("a", 10, link.p)
    link.grant("a", (9, 3, 15))
    link.push("a", 0, (4, 0, 11), 10, token_id=77)
    committed = link.wait("d", Kind.COMMITTED)
    link.assert_arrived({4: 9, 0: 3, 11: 15})  # the data has arrived before the record
    assert committed.record == HandoffRecord(num_tokens=10, token_id=77)
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
    assert token_of(link.wait("d", Kind.COMMITTED)) == 0
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
    assert token_of(link.wait("d", Kind.COMMITTED)) == 6
    link.assert_arrived({1: 2})


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
    assert token_of(link.wait("d", Kind.COMMITTED, "a")) == 50
    assert token_of(link.wait("d", Kind.COMMITTED, "b")) == 51
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
    assert (committed.epoch, token_of(committed)) == (1, 10)
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


def test_a_pair_that_parts_and_meets_again_opens_no_more_descriptors(link: Link) -> None:
    full_exchange(link, "0", 3, 4)
    num_open = count_descriptors()
    for meeting in range(1, 6):
        link.sender.disconnect(link.d)
        link.receiver.disconnect(link.p)
        link.receiver.connect(link.sender.peer_info)
        link.sender.connect(link.receiver.peer_info)
        link.wait("p", Kind.PEER_CONNECTED, count=meeting + 1)
        link.wait("d", Kind.PEER_CONNECTED, count=meeting + 1)
        full_exchange(link, str(meeting), 3, 4)
        assert link.sender.metrics().connections == 1
    # Closing may take a moment. NIXL opened one more descriptor on each side at every meeting.
    wait_until(lambda: count_descriptors() <= num_open, "descriptors to be closed")


def test_a_peer_that_was_started_anew_works_at_once_though_the_old_one_has_transfers(
    link: Link, request: pytest.FixtureRequest
) -> None:
    connector = link.receiver.peer_info.connector
    link.start("old", 8)
    link.wait("d", Kind.STARTED)
    link.receiver.close()
    target = torch.full((NUM_D_BLOCKS, *BLOCK_SHAPE), UNTOUCHED)
    transport = KV_CONNECTORS.load(connector)(f"d{next(numbers)}-contract", memory_of(target))
    receiver = Receiver(transport, lambda: None, lambda error: None)
    request.addfinalizer(receiver.close)
    receiver.loop.start()
    new = Link(link.sender, receiver, link.source, target)
    receiver.expect(True)
    receiver.connect(link.sender.peer_info)
    link.sender.connect(receiver.peer_info)
    assert new.wait("d", Kind.PEER_CONNECTED).bandwidth_bytes_per_s > 0
    full_exchange(new, "a", 3, 4)
    new.assert_arrived({3: 4})
    assert new.wait("p", Kind.FAILED, "old").reason  # it missed its beats


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
            assert token_of(link.wait("d", Kind.COMMITTED, name)) == index
            link.wait("p", Kind.COMMITTED, name)
            target = (index * 5 + round_number) % NUM_D_BLOCKS
            assert torch.equal(link.target[target], link.source[index])


@pytest.mark.nixl
def test_a_slow_path_within_one_host_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    make_transport = KV_CONNECTORS.load("nixl")
    ends = [
        make_transport(f"{side}{next(numbers)}-contract", memory_of(torch.zeros(2, *BLOCK_SHAPE)))
        for side in "pd"
    ]
    for end, other in (ends, ends[::-1]):
        assert end.connect(other.peer_info) == "nixl/ucx tcp"
        assert f"{other.peer_info.engine_id} is on this host, but its bytes travel" in caplog.text
    for end in ends:
        end.close()


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_peer_of_another_connector_is_refused(name: str) -> None:
    make_transport = KV_CONNECTORS.load(name)
    number = next(numbers)
    deaths: list[Exception] = []
    sender = Sender(
        make_transport(f"p{number}-contract", memory_of(torch.zeros(2, *BLOCK_SHAPE))),
        lambda: None,
        deaths.append,
    )
    sender.loop.start()
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


def count_descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def token_of(event: TransferEvent) -> int:
    """Token 1, as the decode node hears of it."""
    assert event.record is not None
    return event.record.token_id
