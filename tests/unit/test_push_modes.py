"""Tests of push modes: a prompt's blocks are sent after it, by chunks, or by layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.api.sampling_params import SamplingParams
from kvconnector.base import BlockPush
from kvconnector.blocks import layer_groups
from prefill_node.options import PushMode
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
NUM_TOKENS = 14  # chunks of 5, 5 and 4 tokens; blocks of 4
WHOLE = None


def record_pushes(cluster: Cluster, during: Callable[[], None] = lambda: None) -> list[BlockPush]:
    """Record the sender's pushes from now on; call ``during`` after each."""
    pushes: list[BlockPush] = []
    send = cluster.sender.push

    def recording(push: BlockPush) -> None:
        pushes.append(push)
        send(push)
        during()

    cluster.sender.push = recording  # type: ignore[method-assign]
    return pushes


def hand_over(cluster: Cluster, number: int = 0) -> None:
    prompt = prompt_of(number, NUM_TOKENS)
    name = f"r{len(cluster.attempts)}"
    cluster.place(name, 1, prompt, GREEDY)
    cluster.settle()
    found = tuple(cluster.attempts[name, 1].tokens.values())
    assert found == reference_tokens(tuple(prompt), GREEDY)  # and its KV: see CheckedEngine


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (PushMode.AFTER_PREFILL, [(0, 4, WHOLE)]),
        (PushMode.CHUNKS, [(0, 1, WHOLE), (1, 1, WHOLE), (2, 2, WHOLE)]),
        # The third block was begun in the second chunk, and becomes full in the last.
        (PushMode.LAYERS, [(0, 1, WHOLE), (1, 1, WHOLE), (2, 2, (0, 1)), (2, 2, (1, 2))]),
    ],
)
def test_each_mode_sends_every_block_once(
    mode: PushMode, expected: list[object], async_scheduling: bool
) -> None:
    cluster = make_cluster(20, push_mode=mode, async_scheduling=async_scheduling)
    pushes = record_pushes(cluster)
    hand_over(cluster)
    sent = [(p.first_block, len(p.block_ids), p.layers) for p in pushes if p.block_ids]
    assert sorted(sent, key=str) == sorted(expected, key=str)
    assert [p.record is not None for p in pushes] == [False] * (len(pushes) - 1) + [True]
    assert_clean(cluster)


@pytest.mark.parametrize("mode", PushMode)
def test_the_router_hears_of_token_1_before_the_sender_gets_its_commit(mode: PushMode) -> None:
    """A client waits for the one, and the decode node's next step for the other."""
    cluster = make_cluster(20, push_mode=mode)
    told: list[bool] = []
    pushes = record_pushes(cluster, lambda: told.append(bool(cluster.attempts["r0", 1].tokens)))
    hand_over(cluster)
    assert [is_told for push, is_told in zip(pushes, told, strict=True) if push.record] == [True]


def test_layers_are_in_the_decode_node_before_the_next_ones_are_computed() -> None:
    cluster = make_cluster(20)
    arrived = []

    def let_it_travel() -> None:
        cluster.sender.loop.round()
        while cluster.network.writes:
            arrived.append(cluster.network.writes[0].layers)
            cluster.network.land(0)

    cluster.place("a", 1, prompt_of(0, 3), GREEDY)  # one chunk, so all of it is the tail
    cluster.step("p")  # its Start is on its way, and its forward done: the grant came too late
    cluster.settle()
    record_pushes(cluster, let_it_travel)
    cluster.place("b", 1, prompt_of(1, NUM_TOKENS), GREEDY)
    steps = 0
    while not any(layers == (1, 2) for layers in arrived):
        for engine_id in "dp":
            cluster.step(engine_id)
            cluster.round(engine_id)
            while cluster.network.messages:
                cluster.network.deliver(0)
            cluster.round("d")
        steps += 1
        assert steps < 20
    assert arrived[-2:] == [(0, 1), (1, 2)]
    cluster.settle()
    assert cluster.d_engine.num_commits == 2
    assert_clean(cluster)


def test_a_cached_prefix_travels_while_the_rest_is_computed() -> None:
    cluster = make_cluster(20)
    hand_over(cluster)
    pushes = record_pushes(cluster)
    hand_over(cluster)
    assert [(p.first_block, len(p.block_ids), p.layers) for p in pushes] == [
        (0, 3, WHOLE),
        (3, 1, (0, 1)),
        (3, 1, (1, 2)),
        (3, 0, WHOLE),  # token 1
    ]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_that_lie_by_heads_go_whole_and_before_token_1(async_scheduling: bool) -> None:
    cluster = make_cluster(
        20, async_scheduling=async_scheduling, engine_options={"kv_layout": "heads"}
    )
    pushes = record_pushes(cluster)
    hand_over(cluster)
    # A "layer" is all that there is to cut; a step launched ahead may push its layer before a whole
    # chunk of the step before it.
    sent = [(p.first_block, len(p.block_ids), p.layers) for p in pushes]
    expected = [(0, 1, WHOLE), (1, 1, WHOLE), (2, 2, (0, 1)), (2, 0, WHOLE)]
    assert sorted(sent, key=str) == sorted(expected, key=str)
    assert sent[-1] == expected[-1]
    assert [push.record is not None for push in pushes] == [False, False, False, True]
    assert_clean(cluster)


def test_of_several_kv_cache_groups_the_last_chunk_goes_whole() -> None:
    cluster = make_cluster(20, mixed=True)
    pushes = record_pushes(cluster)
    cluster.place("a", 1, prompt_of(0, NUM_TOKENS), GREEDY)
    cluster.settle()
    assert {p.layers for p in pushes} == {WHOLE}
    assert cluster.attempts["a", 1].is_complete


@pytest.mark.parametrize("num_landed", range(4))
def test_a_cancel_amid_the_layers_of_the_last_chunk_leaves_nothing(num_landed: int) -> None:
    cluster = make_cluster(20, async_scheduling=True)
    pushes = record_pushes(cluster)
    cluster.place("a", 1, prompt_of(0, NUM_TOKENS), GREEDY)
    for _ in range(100):
        for engine_id in "dp":
            cluster.step(engine_id)
            cluster.round(engine_id)
            while cluster.network.messages:
                cluster.network.deliver(0)
            cluster.round("d")
        if any(p.layers for p in pushes):
            break
    for _ in range(num_landed):
        if cluster.network.writes:
            cluster.network.land(0)
        cluster.round("p")
    cluster.cancel(("a", 1))
    hand_over(cluster, 1)
    assert_clean(cluster)


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "expected"),
    [
        (1, 4, [(0, 1)]),
        (6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)]),
        (28, 4, [(0, 7), (7, 14), (14, 21), (21, 28)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_layers_are_cut_in_order_and_without_gaps(
    num_layers: int, num_groups: int, expected: list[tuple[int, int]]
) -> None:
    assert list(layer_groups(num_layers, num_groups)) == expected
