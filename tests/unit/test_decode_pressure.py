"""Tests of the short rests of prompts that a decode node computes, and of preempted requests."""

from __future__ import annotations

import pytest

from baton.api.errors import ConfigError
from baton.api.sampling_params import SamplingParams
from decode_node.options import DecodeOptions
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of, reference_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SHORT = DecodeOptions(local_prefill_threshold=3)


def assert_right(cluster: Cluster, key: tuple[str, int], *, mixed: bool = False) -> None:
    attempt = cluster.attempts[key]
    assert attempt.is_complete
    expected = reference_tokens(tuple(attempt.prompt), attempt.params, mixed=mixed)
    assert tuple(attempt.tokens[index] for index in sorted(attempt.tokens)) == expected


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "mixed"),
    [
        (13, 1, False),
        (15, 3, False),
        (16, 0, False),
        (11, 3, False),
        (12, 0, False),
        (9, 1, False),
        (13, 1, True),
        (15, 3, True),
        (16, 0, True),
        (9, 0, True),
    ],
)
def test_a_short_rest_is_computed_here_and_the_prefill_nodes_leg_ends(
    num_tokens: int, num_computed: int, mixed: bool
) -> None:
    """A decode node computes up to 3 missing tokens of a prompt itself.

    A mixed model finds no prefix that ends within a cached one: its window has slid out.
    """
    cluster = make_cluster(20, mixed=mixed, options=SHORT)
    cluster.place("a", 1, prompt_of(1, 12), GREEDY)
    cluster.settle()
    num_written = len(cluster.network.written)
    cluster.place("b", 1, prompt_of(1, num_tokens), GREEDY)
    cluster.settle()
    assert_right(cluster, ("b", 1), mixed=mixed)
    receipt = cluster.receipts["b"]
    assert receipt.num_prompt_tokens_computed == num_computed
    if num_computed:
        assert len(cluster.network.written) == num_written
        assert (receipt.push.num_blocks, receipt.push.transport) == (0, "")
        assert receipt.num_cached_tokens == num_tokens - num_computed
        assert receipt.num_forwards == GREEDY.max_tokens
        assert receipt.steps_until_first == 1
        assert cluster.sender.started == [("a", 1), ("b", 1)]  # it met a tombstone
    assert_clean(cluster)


@pytest.mark.parametrize(("mixed", "num_computed"), [(False, 4), (True, 0)])
def test_a_prompt_that_is_known_to_its_end_is_received_where_less_of_it_is_not_known(
    mixed: bool, num_computed: int
) -> None:
    """Compute the last block of a fully cached prompt here, but receive a prompt with windows.

    Windows keep nothing for a prefix that is one block shorter: all would be computed here.
    """
    cluster = make_cluster(20, mixed=mixed, options=DecodeOptions(local_prefill_threshold=4))
    for name in "ab":
        cluster.place(name, 1, prompt_of(1, 12), GREEDY)
        cluster.settle()
        assert_right(cluster, (name, 1), mixed=mixed)
    assert cluster.receipts["b"].num_prompt_tokens_computed == num_computed
    assert_clean(cluster)


def test_a_start_that_came_before_its_command_is_cancelled_when_the_rest_is_computed_here() -> None:
    cluster = make_cluster(20, options=SHORT)
    cluster.place("a", 1, prompt_of(1, 12), GREEDY)
    cluster.settle()
    early = cluster.d._inbox._commands
    cluster.place("b", 1, prompt_of(1, 13), GREEDY)
    command = early.pop()
    for _ in range(3):
        cluster.step("p")
        cluster.round("p")
        while cluster.network.messages:
            cluster.network.deliver(0)
        cluster.round("d")
        cluster.step("d")
    early.append(command)
    cluster.settle()
    assert_right(cluster, ("b", 1))
    assert cluster.receipts["b"].num_prompt_tokens_computed == 1
    assert_clean(cluster)


def test_a_prompt_that_is_short_as_a_whole_is_received() -> None:
    cluster = make_cluster(20, options=DecodeOptions())
    cluster.place("a", 1, prompt_of(1, 3), GREEDY)
    cluster.settle()
    assert cluster.receipts["a"].num_prompt_tokens_computed == 0
    assert_clean(cluster)


def test_without_memory_for_it_a_short_rest_is_received_like_any_other() -> None:
    cluster = make_cluster(7, options=SHORT)
    cluster.place("a", 1, prompt_of(1, 12), GREEDY)
    cluster.settle()
    taken = cluster.d.engine.block_pool.allocate(3)
    cluster.place("b", 1, prompt_of(1, 13), GREEDY)
    cluster.step("d")
    assert cluster.d.requests()[0].transfer_state == "PARKED"
    cluster.d.engine.block_pool.release(taken or [])
    cluster.settle()
    assert_right(cluster, ("b", 1))
    assert cluster.receipts["b"].num_prompt_tokens_computed == 0
    assert_clean(cluster)


def test_a_local_request_goes_on_behind_the_output_of_an_earlier_attempt() -> None:
    cluster = make_cluster(20, options=SHORT)
    cluster.place("a", 1, prompt_of(1, 12), GREEDY)
    cluster.settle()
    output = [cluster.attempts["a", 1].tokens[index] for index in range(2)]
    cluster.place("a", 2, prompt_of(1, 12), GREEDY, output)
    cluster.settle()
    assert_right(cluster, ("a", 2))
    assert cluster.receipts["a"].num_forwards == 2
    assert_clean(cluster)


@pytest.mark.parametrize("preemption", ["recompute", "hand-back"])
def test_a_preempted_request_is_handed_back_and_its_retry_computes_no_prompt_here(
    preemption: str,
) -> None:
    long = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    cluster = make_cluster(7, preemption=preemption)
    for number, name in enumerate("ab"):
        cluster.place(name, 1, prompt_of(number, 8), long)
    cluster.settle()
    assert cluster.d.engine._scheduler.num_preemptions > 0
    assert_right(cluster, ("a", 1))
    attempt = cluster.attempts["b", 1]
    if preemption == "recompute":
        assert_right(cluster, ("b", 1))
        assert cluster.receipts["b"].num_preemptions > 0
        return
    assert attempt.error_code == "PREEMPTED"
    assert "preempted" in attempt.error
    output = [attempt.tokens[index] for index in sorted(attempt.tokens)]
    assert 1 < len(output) < long.max_tokens  # it got some way
    cluster.place("b", 2, attempt.prompt, long, output)
    cluster.settle()
    assert_right(cluster, ("b", 2))
    assert cluster.receipts["b"].num_prompt_tokens_computed == 0
    assert_clean(cluster)


def test_the_blocks_of_a_preempted_request_are_found_by_its_retry_while_nobody_needs_them() -> None:
    long = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    cluster = make_cluster(20, preemption="hand-back")
    cluster.place("a", 1, prompt_of(0, 8), long)
    for _ in range(30):
        if len(cluster.attempts["a", 1].tokens) > 5:
            break
        for role in "pd":
            cluster.round(role)
            cluster.step(role)
        while cluster.network.messages:
            cluster.network.deliver(0)
        while cluster.network.writes:
            cluster.network.land(0)
    scheduler = cluster.d.engine._scheduler
    scheduler._preempt(scheduler._running.pop())
    cluster.settle()
    attempt = cluster.attempts["a", 1]
    assert attempt.error_code == "PREEMPTED"
    output = [attempt.tokens[index] for index in sorted(attempt.tokens)]
    num_written = len(cluster.network.written)
    cluster.place("a", 2, attempt.prompt, long, output)
    cluster.settle()
    assert_right(cluster, ("a", 2))
    assert len(cluster.network.written) == num_written + 1  # the block that was not full
    assert_clean(cluster)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_step_has_freed_is_taken_at_once(asynchronous: bool) -> None:
    """A node's thread sleeps only when a step says that there is no more to do."""
    long = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    cluster = make_cluster(7, async_scheduling=asynchronous, preemption="hand-back")
    for number, name in enumerate("ab"):
        cluster.place(name, 1, prompt_of(number, 8), long, alone=True)
    while cluster.d.step():
        cluster.d.engine.check()
    assert cluster.attempts["b", 1].error_code == "PREEMPTED"
    assert_right(cluster, ("a", 1))

    for number, name in enumerate("vwxyz"):  # one more than run at a time
        cluster.place(name, 1, prompt_of(number, 2), GREEDY)
    while cluster.p.step():
        cluster.p.engine.check()
    assert all(cluster.attempts[name, 1].tokens for name in "vwxyz")
    cluster.settle()
    assert_clean(cluster)


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="local_prefill_threshold: must be 0 or more, got -1"):
        DecodeOptions(local_prefill_threshold=-1)
