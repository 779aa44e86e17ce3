"""What a decode node has of a prompt does not travel: its own cache, and what arrived before."""

from __future__ import annotations

import pytest

from baton.sampling_params import SamplingParams
from tests.fakes.handoff_cluster import BLOCK_SIZE, Cluster
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
