"""Tests that a hand-off sends no block that the decode node has cached or received before."""

from __future__ import annotations

import pytest

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import BlockHash
from decode_node import reservations
from decode_node.options import DecodeOptions
from engine.core.request import Request
from kvconnector.peer_process import PeerProcess
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def place(cluster: Cluster, request_id: str, num_tokens: int, epoch: int = 1) -> None:
    """Every prompt here is a prefix of the longest one."""
    cluster.place(request_id, epoch, prompt_of(3, num_tokens), GREEDY)


def run(cluster: Cluster) -> list[int]:
    """Let everything happen; returns the decode node's blocks that were written."""
    first = len(cluster.network.written)
    cluster.settle()
    return cluster.network.written[first:]


def assert_right(cluster: Cluster, *, mixed: bool = False) -> None:
    for attempt in cluster.attempts.values():
        if attempt.is_complete:
            expected = reference_tokens(tuple(attempt.prompt), attempt.params, mixed=mixed)
            assert tuple(attempt.tokens[i] for i in sorted(attempt.tokens)) == expected


@pytest.mark.parametrize(
    ("first", "second", "num_hits"), [(12, 18, 3), (13, 18, 3), (18, 13, 3), (3, 18, 0)]
)
def test_only_what_the_decode_node_lacks_travels(first: int, second: int, num_hits: int) -> None:
    cluster = make_cluster(20)
    place(cluster, "a", first)
    assert len(run(cluster)) == -(-first // BLOCK_SIZE)
    place(cluster, "b", second)
    assert len(run(cluster)) == -(-second // BLOCK_SIZE) - num_hits
    receipt = cluster.receipts["b"]
    assert receipt.num_cached_tokens == num_hits * BLOCK_SIZE
    assert receipt.num_prompt_tokens_computed == 0
    assert receipt.push.num_blocks == -(-second // BLOCK_SIZE) - num_hits
    assert (receipt.push.num_bytes > 0) == (receipt.push.num_blocks > 0)
    assert cluster.attempts["b", 1].is_complete
    assert cluster.d_engine.num_commits == 2  # their KV was right: see CheckedEngine
    assert_right(cluster)
    assert_clean(cluster)


def test_of_full_blocks_that_are_all_cached_nothing_travels_but_token_1() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 12)
    run(cluster)
    place(cluster, "b", 12)
    assert run(cluster) == []
    receipt = cluster.receipts["b"]
    assert (receipt.push.num_blocks, receipt.num_cached_tokens) == (0, 12)
    assert receipt.num_forwards == GREEDY.max_tokens - 1
    assert_right(cluster)
    assert_clean(cluster)


def test_of_a_mixed_model_a_cached_prefix_does_not_travel_in_any_group() -> None:
    cluster = make_cluster(20, mixed=True)
    place(cluster, "a", 16)
    assert len(run(cluster)) == 4 + 2 * 2  # a window of 6 looks back to position 11
    place(cluster, "b", 18)
    assert len(run(cluster)) == 3  # the last block of each group
    assert cluster.receipts["b"].num_cached_tokens == 16
    assert cluster.d_engine.num_commits == 2
    assert_right(cluster, mixed=True)
    assert_clean(cluster)


def states(cluster: Cluster) -> dict[str, str]:
    return {view.request_id: view.transfer_state for view in cluster.d.requests()}


def start_all(cluster: Cluster) -> None:
    """The prefill node computes all, every message arrives, no write lands."""
    for _ in range(12):
        for role in "pd":
            cluster.round(role)
            cluster.step(role)
        while cluster.network.messages:
            cluster.network.deliver(0)


def test_two_requests_in_flight_with_one_new_prefix_move_it_once_and_block_nobody() -> None:
    cluster = make_cluster(40)
    place(cluster, "a", 18)
    place(cluster, "b", 17)
    cluster.place("other", 1, prompt_of(4, 10), GREEDY)
    start_all(cluster)
    assert states(cluster) == {"a": "GRANTED", "b": "PARKED", "other": "GRANTED"}
    assert cluster.d.engine.requests["b"].block_ids == []  # who waits holds nothing
    assert len(run(cluster)) == 5 + 1 + 3
    assert cluster.receipts["b"].num_cached_tokens == 16
    assert all(attempt.is_complete for attempt in cluster.attempts.values())
    assert_right(cluster)
    assert_clean(cluster)


@pytest.mark.parametrize("end", ["cancelled", "failed", "killed"])
def test_who_waits_for_another_ones_blocks_goes_on_when_that_one_fails(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "TICK_S", 0.0)
    cluster = make_cluster(40)
    dead = cluster.dead
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in dead)
    for name in ("a", "b", "c"):
        place(cluster, name, 18)
    start_all(cluster)
    assert states(cluster) == {"a": "GRANTED", "b": "PARKED", "c": "PARKED"}
    if end == "cancelled":
        cluster.cancel(("a", 1))
    elif end == "failed":
        cluster.network.fail(0, landed=False)
    else:
        cluster.kill("p")
        cluster.step("d")
        assert states(cluster) == {}  # all were to come from there
        for attempt in cluster.attempts.values():
            attempt.is_open = False
        cluster.restart_prefill_node()
        for name in ("b", "c"):
            place(cluster, name, 18, epoch=2)
    cluster.settle()
    epoch = 2 if end == "killed" else 1
    assert all(cluster.attempts[name, epoch].is_complete for name in ("b", "c"))
    cached = sorted(cluster.receipts[name].num_cached_tokens for name in ("b", "c"))
    assert cached == [0, 16]  # one of them brought it for both
    assert_right(cluster)
    assert_clean(cluster)


@pytest.mark.parametrize(
    ("options", "num_granted"),
    [
        (DecodeOptions(max_receiving_requests=2), 2),
        (DecodeOptions(max_receiving_tokens=29), 2),
        (DecodeOptions(max_receiving_tokens=30), 3),
        (DecodeOptions(max_receiving_tokens=1), 1),  # one alone may always
        (DecodeOptions(), 4),
    ],
)
def test_what_is_received_at_a_time_has_a_budget(options: DecodeOptions, num_granted: int) -> None:
    cluster = make_cluster(40, options=options)
    for number, name in enumerate("abcd"):
        cluster.place(name, 1, prompt_of(number, 10), GREEDY)
    start_all(cluster)
    parked = ["PARKED"] * (4 - num_granted)
    assert list(states(cluster).values()) == ["GRANTED"] * num_granted + parked
    cluster.settle()
    assert all(attempt.is_complete for attempt in cluster.attempts.values())
    assert_clean(cluster)


def test_half_of_the_cache_is_the_budget_if_none_is_given() -> None:
    cluster = make_cluster(20)
    for number, name in enumerate("abc"):
        cluster.place(name, 1, prompt_of(number, 18), GREEDY)
    start_all(cluster)
    assert list(states(cluster).values()) == ["GRANTED", "GRANTED", "PARKED"]  # 36 of 40 tokens
    cluster.settle()
    assert all(attempt.is_complete for attempt in cluster.attempts.values())


@pytest.mark.parametrize(
    ("name", "value"), [("max_receiving_requests", 0), ("max_receiving_tokens", -1)]
)
def test_options_of_a_decode_node_check_themselves(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be . or more, got {value}"):
        DecodeOptions(**{name: value})


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [(11, DecodeOptions(max_receiving_tokens=100)), (40, DecodeOptions(max_receiving_requests=1))],
    ids=["no memory", "no budget"],
)
def test_who_waits_is_looked_up_again_only_when_something_was_freed(
    num_blocks: int, options: DecodeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(num_blocks, options=options)
    lookups: list[str] = []
    find = cluster.d_engine.kv_cache_manager.find_initial_prefix

    def count(request: Request) -> tuple[int, list[BlockHash]]:
        lookups.append(request.request_id)
        return find(request)

    monkeypatch.setattr(cluster.d_engine.kv_cache_manager, "find_initial_prefix", count)
    cluster.place("a", 1, prompt_of(0, 18), GREEDY)
    cluster.place("b", 1, prompt_of(1, 18), GREEDY)
    start_all(cluster)
    assert sorted(states(cluster).values()) == ["GRANTED", "PARKED"]
    lookups.clear()
    for _ in range(10):
        cluster.step("d")
    assert lookups == []
    cluster.settle()
    assert all(attempt.is_complete for attempt in cluster.attempts.values())
    assert lookups != []
    assert_right(cluster)
    assert_clean(cluster)
