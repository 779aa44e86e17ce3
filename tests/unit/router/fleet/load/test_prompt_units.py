"""Unit tests of prompt units: hand-computed sizes, and predicted times of long prompts."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.outputs import PrefillReceipt
from baton.link.words import NodeBeat, NodeRegistration, NodeRole, StepTime
from router.fleet.load.node_load import NodeLoad, SharedRates
from router.fleet.load.prompt_units import (
    MAX_SHARE,
    attention_share,
    profile_points,
    prompt_units,
    tokens_until,
    units_until,
)
from router.fleet.node_claims import registration_problem
from tests.fakes.router.long_prompts import CHUNK, LENGTHS, SHARE, QuadraticNode
from tests.fakes.router.nodes import PREFILL_RECEIPT, make_registration
from tests.property.num_examples import num_examples

NODE = QuadraticNode()


def profiled(
    step_times: tuple[StepTime, ...], context_times: tuple[StepTime, ...] = ()
) -> NodeRegistration:
    plain = make_registration("p", NodeRole.PREFILL, max_model_len=20_000)
    return dataclasses.replace(plain, step_times=step_times, context_step_times=context_times)


def receipt(num_computed: int, num_cached: int = 0) -> PrefillReceipt:
    return dataclasses.replace(
        PREFILL_RECEIPT,
        prefill_s=math.inf,
        num_computed_tokens=num_computed,
        num_cached_tokens=num_cached,
    )


@pytest.mark.parametrize(
    ("share", "num_uncomputed", "num_cached", "units"),
    [
        (0.0, 1000, 0, 1000),
        (0.0, 1000, 9000, 1000),
        (0.001, 1000, 0, 1500),  # 1,000 tokens attend to 500 others on average
        (0.001, 1000, 2000, 3500),  # and to 2,000 cached ones
        (0.001, 3000, 0, 7500),
    ],
)
def test_units_are_tokens_plus_a_share_of_the_tokens_attended_to(
    share: float, num_uncomputed: int, num_cached: int, units: float
) -> None:
    assert prompt_units(share, num_uncomputed, num_cached) == units
    difference = units_until(share, num_cached + num_uncomputed) - units_until(share, num_cached)
    assert difference == pytest.approx(units)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    share=st.floats(0, MAX_SHARE),
    num_tokens=st.integers(1, 2**26),
    num_cached=st.integers(0, 2**26),
)
def test_units_grow_with_the_prompt_and_can_be_turned_back(
    share: float, num_tokens: int, num_cached: int
) -> None:
    units = prompt_units(share, num_tokens, num_cached)
    assert num_tokens <= units < math.inf
    assert units <= prompt_units(share, num_tokens, num_cached + 1)
    assert units < prompt_units(share, num_tokens + 1, num_cached)
    assert tokens_until(share, units_until(share, num_tokens)) == pytest.approx(num_tokens)


@pytest.mark.parametrize("context", [CHUNK, 2000, 4096])
def test_the_share_follows_from_a_step_behind_a_context(context: int) -> None:
    assert attention_share(NODE.registration(context)) == pytest.approx(SHARE)


def test_without_a_step_behind_a_context_a_prompt_is_a_straight_line_over_tokens() -> None:
    old = dataclasses.replace(NODE.registration(), context_step_times=())
    assert attention_share(old) == 0
    times = old.step_times
    points = [(one.num_tokens, one.seconds) for one in times]
    assert profile_points(old, 0.0) == (*points, (4 * CHUNK, 4 * times[-1].seconds))
    load = NodeLoad(old)
    assert load.prompt_s(1000, 0) == load.prompt_s(1000, 9000) == load.prefill.seconds(1000)
    account = load.note_opened(1000, num_uncomputed=1000, num_cached=500)
    assert load.prefill_queue_s == load.prefill.base + 1000 * load.prefill.per_unit
    load.note_closed(account)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_profile_predicts_prompts_of_all_lengths(num_tokens: int) -> None:
    """A straight line is wrong by factors of up to ten for these prompts."""
    load = NODE.load()
    assert load.prompt_s(num_tokens, 0) == pytest.approx(NODE.prompt_s(num_tokens), rel=0.1)
    rest_s = NODE.prompt_s(num_tokens) - NODE.prompt_s(num_tokens - CHUNK)
    assert load.prompt_s(CHUNK, num_tokens - CHUNK) == pytest.approx(rest_s, rel=0.1)


@pytest.mark.parametrize("factor", [0.7, 1.0, 2.5])
def test_measured_prompts_of_all_lengths_correct_the_profile(factor: float) -> None:
    now = 0.0
    load = NodeLoad(NODE.registration(), SharedRates(), lambda: now)
    for number in range(30):
        num_tokens = LENGTHS[number % 3]
        num_cached = (number % 2) * num_tokens // 2
        now += factor * (NODE.prompt_s(num_tokens) - NODE.prompt_s(num_cached))
        load.note_prefilled([receipt(num_tokens - num_cached, num_cached)])
    for num_tokens in LENGTHS:
        expected_s = factor * NODE.prompt_s(num_tokens)
        assert load.prompt_s(num_tokens, 0) == pytest.approx(expected_s, rel=0.1)


def test_a_queue_is_the_sum_of_its_prompts_and_cached_tokens_are_attended_to() -> None:
    load = NODE.load()
    prompts = [(1000, 0), (1000, 9000), (10_000, 0)]
    accounts = [
        load.note_opened(num, num_uncomputed=num, num_cached=cached) for num, cached in prompts
    ]
    expected_s = [load.prompt_s(num, cached) for num, cached in prompts]
    assert expected_s[1] > 3 * expected_s[0]
    assert load.prefill_queue_s == pytest.approx(sum(expected_s), rel=1e-3)
    forecasts = [account.forecast for account in accounts]
    assert [one.compute_s for one in forecasts if one] == pytest.approx(expected_s, rel=1e-3)
    for account in accounts:
        load.note_closed(account)
    assert load.prefill_queue_s == 0


def test_other_routers_tokens_count_as_many_units_as_this_routers_prompts() -> None:
    load = NODE.load()
    load.note_beat(NodeBeat(num_uncomputed_tokens=10_000))
    assert load.prefill_queue_s == pytest.approx(10_000 * load.prefill.per_unit)
    load.note_beat(NodeBeat())
    for _ in range(200):
        load.note_closed(load.note_opened(8000, num_uncomputed=8000))
    load.note_beat(NodeBeat(num_uncomputed_tokens=10_000))
    units = 10_000 * (1 + load.attention_share * 4000)
    assert load.prefill_queue_s == pytest.approx(units * load.prefill.per_unit, rel=0.01)


def test_other_routers_tokens_count_by_each_nodes_own_share() -> None:
    """Regression: prompts on a node with slow attention made a token count more on all nodes."""
    shared = SharedRates()
    slow = NODE.load(shared)
    plain = dataclasses.replace(NODE.registration(name="p1"), context_step_times=())
    fast = NodeLoad(plain, shared, lambda: 0.0)
    for _ in range(200):
        slow.note_closed(slow.note_opened(8000, num_uncomputed=8000))
    assert slow.units_per_token == pytest.approx(1 + slow.attention_share * 4000, rel=0.01)
    fast.note_beat(NodeBeat(num_uncomputed_tokens=10_000))
    assert fast.prefill_queue_s == pytest.approx(10_000 * fast.prefill.per_unit)


def test_a_prompt_computed_on_a_decode_node_is_measured_by_its_units() -> None:
    now = 0.0
    load = NodeLoad(NODE.registration(role=NodeRole.DECODE), SharedRates(), lambda: now)
    for number in range(30):
        num_tokens = LENGTHS[number % 3]
        account = load.note_opened(num_tokens, num_uncomputed=num_tokens)
        now += 2 * NODE.prompt_s(num_tokens)
        load.note_begun(account)
        load.note_closed(account)
    for num_tokens in LENGTHS:
        expected_s = 2 * NODE.prompt_s(num_tokens)
        assert load.prompt_s(num_tokens, 0) == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize(
    ("step_times", "context_times"),
    [
        (((1, 0.01), (512, 0.1)), ((512, 1e9, 4096),)),  # disturbed for very long
        (((1, 0.01), (512, 0.1)), ((512, 1e-9, 4096),)),  # faster with a context
        (((1, 0.01), (512, 0.1)), ((64, 0.1, 4096),)),  # no such step without a context
        (((1, 0.1), (512, 0.01)), ((512, 1.0, 4096),)),  # many tokens faster than one
        (((1, 1e9), (512, 1e9)), ((512, 1e9, 1),)),
        (((1, 1e-300), (2, 2e-300)), ((2, 1e9, 1),)),
        (((1, 5e-324), (2, 1e-323)), ((2, 1.0, 1),)),  # the smallest numbers: 0.9 of them is 1
        (((512, 0.1),), ((512, 1.0, 4096),)),
        ((), ((512, 1.0, 4096), (1, 0.1, 1))),
    ],
)
def test_odd_profiles_yield_possible_times(
    step_times: tuple[tuple[int, float], ...], context_times: tuple[tuple[int, float, int], ...]
) -> None:
    registration = profiled(
        tuple(StepTime(*one) for one in step_times), tuple(StepTime(*one) for one in context_times)
    )
    assert registration_problem(registration) == ""
    assert_possible(registration)


seconds = st.floats(0, 1e9, exclude_min=True)
sizes = st.integers(1, 2**26)
STEP_TIMES = st.lists(
    st.builds(StepTime, sizes, seconds), max_size=16, unique_by=lambda one: one.num_tokens
).map(lambda times: tuple(sorted(times, key=lambda one: one.num_tokens)))


@settings(max_examples=num_examples(200), deadline=None)
@given(
    step_times=STEP_TIMES,
    context_times=st.lists(st.builds(StepTime, sizes, seconds, sizes), max_size=4).map(tuple),
    data=st.data(),
)
def test_every_profile_that_is_accepted_yields_possible_times(
    step_times: tuple[StepTime, ...], context_times: tuple[StepTime, ...], data: st.DataObject
) -> None:
    if step_times:  # else the context's step rarely has the tokens of another step
        num_tokens = data.draw(st.sampled_from(step_times)).num_tokens
        own = StepTime(num_tokens, data.draw(seconds), data.draw(sizes))
        context_times = (*context_times, own)
    registration = profiled(step_times, context_times)
    assert registration_problem(registration) == ""
    assert_possible(registration)


def assert_possible(registration: NodeRegistration) -> None:
    """Assert that a node's predicted times are finite and not negative, and grow with prompts."""
    load = NodeLoad(registration)
    assert 0 <= load.attention_share <= MAX_SHARE
    for _ in range(3):
        last_s = 0.0
        for num_tokens in (1, 1000, 20_000, 2**26):
            expected_s = load.prompt_s(num_tokens, 0)
            assert last_s <= expected_s <= load.prompt_s(num_tokens, 2**26) < math.inf
            last_s = expected_s
        account = load.note_opened(2**26, num_uncomputed=2**26, num_cached=2**26)
        load.note_beat(NodeBeat(num_uncomputed_tokens=2**32 - 1))
        assert 0 <= load.prefill_queue_s < math.inf
        load.note_prefilled([receipt(2**26, 2**26)], [account])
        load.note_closed(account)


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        (((512, math.nan, 512),), "seconds must be above 0 and at most 1000000000"),
        (((512, 0.1, 0),), "num_context_tokens must be 1 to 67108864, got 0"),
        (((0, 0.1, 512),), "num_tokens must be 1 to 67108864, got 0"),
        (((512, 0.1, 2**27),), "num_context_tokens must be 1 to 67108864, got 134217728"),
        (((512, 0.1, 512),) * 17, "must be at most 16, got 17"),
        (((512, 0.1, 512), (1, 0.1, 512)), ""),
    ],
)
def test_steps_behind_a_context_that_cannot_be_are_refused(
    times: tuple[tuple[int, float, int], ...], problem: str
) -> None:
    registration = profiled((), tuple(StepTime(*one) for one in times))
    told = registration_problem(registration)
    assert told == (f"context_step_times: {problem}" if problem else "")
