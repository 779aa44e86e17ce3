"""Unit tests of MeasuredLine: known lines, odd prompts, and forgotten measurements."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.load.measured_line import NUM_KEPT, MeasuredLine, Point

DEFAULT = ((0.0, 0.01), (8000.0, 0.81))
PROFILE = ((1.0, 0.009), (64.0, 0.062), (512.0, 0.44))  # of a CPU
TURNS = (60, 105, 180, 265)  # tokens that are computed for turns of a chat


def cpu_s(num_tokens: float) -> float:
    """Return what a prompt takes on the machine of `PROFILE` while it serves."""
    return 0.010 + 0.00092 * num_tokens


def make(profile: tuple[Point, ...] = ()) -> MeasuredLine:
    return MeasuredLine(profile, shared=MeasuredLine(default=DEFAULT))


def serve(line: MeasuredLine, num_prompts: int, *, factor: float = 1.0, seed: int = 1) -> None:
    """Measure turns of chats, each up to about a quarter off."""
    draw = random.Random(seed)
    for _ in range(num_prompts):
        tokens = draw.choice(TURNS)
        line.measure(tokens, factor * cpu_s(tokens) * draw.lognormvariate(0, 0.12))
        line.refresh()


def assert_near(line: MeasuredLine, seconds: float, num_tokens: int) -> None:
    assert line.seconds(num_tokens) == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("profile", [(), PROFILE], ids=["old node", "profile"])
def test_turns_of_a_chat_are_not_nailed_to_an_estimate_for_gpus(profile: tuple[Point, ...]) -> None:
    line = make(profile)
    line.measure(96, 8 * cpu_s(96))  # the first prompt is cold
    serve(line, 12)
    for tokens in TURNS:
        assert_near(line, cpu_s(tokens), tokens)
    assert 0.00069 < line.per_unit < 0.00115


def test_a_profile_holds_where_the_only_prompt_was_a_cold_one() -> None:
    line = make(PROFILE)
    line.measure(96, 8 * cpu_s(96))
    line.refresh()
    for tokens in (1, 105, 265, 512, 4096):
        assert_near(line, 0.009 + 0.00086 * tokens, tokens)


def test_a_node_without_a_profile_forgets_its_cold_prompt_after_a_few() -> None:
    line = make()
    line.measure(96, 8 * cpu_s(96))
    line.refresh()
    assert line.seconds(96) < 2 * cpu_s(96)
    serve(line, 3)
    for tokens in (105, 265):
        assert_near(line, cpu_s(tokens), tokens)


def test_outliers_do_not_move_the_line() -> None:
    line = make(PROFILE)
    serve(line, 10)
    before = line.seconds(180)
    line.measure(105, 6.0)
    line.measure(105, 0.0)
    line.refresh()
    assert line.seconds(180) == pytest.approx(before, rel=0.25)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_another_speed_is_followed(factor: float) -> None:
    """Cores that were lent go and come."""
    line = make(PROFILE)
    serve(line, 40)
    serve(line, NUM_KEPT, factor=factor, seed=2)
    for tokens in (105, 265):
        assert_near(line, factor * cpu_s(tokens), tokens)


def test_a_new_node_begins_with_its_own_profile_or_with_what_others_measured() -> None:
    shared = MeasuredLine(default=DEFAULT)
    serve(MeasuredLine(PROFILE, shared=shared), 20)
    old, fast = MeasuredLine(shared=shared), MeasuredLine(((1, 0.004), (512, 0.03)), shared=shared)
    assert_near(old, cpu_s(200), 200)
    assert_near(fast, 0.004 + 200 * 0.026 / 511, 200)
    assert not old.is_known
    assert fast.is_known


def test_a_new_node_follows_what_others_measure_until_it_is_asked() -> None:
    shared = MeasuredLine(default=DEFAULT)
    waiting = MeasuredLine(shared=shared)
    assert waiting.seconds(1000) == pytest.approx(0.11)
    serve(MeasuredLine(shared=shared), 20)
    waiting.refresh()
    assert_near(waiting, cpu_s(200), 200)


@given(
    st.lists(st.tuples(st.floats(0, 1e8), st.floats(0, 1e9)), max_size=30),
    st.lists(st.tuples(st.integers(1, 2**26), st.floats(1e-300, 1e9)), max_size=4),
)
def test_whatever_is_measured_the_line_is_of_numbers_and_not_below_0(
    measured: list[tuple[float, float]], profile: list[tuple[int, float]]
) -> None:
    rising = sorted({float(tokens): seconds for tokens, seconds in profile}.items())
    line = make(tuple(rising) if len(rising) > 1 else ())
    for tokens, seconds in measured:
        line.measure(tokens, seconds)
        line.refresh()
        assert 0 <= line.base < math.inf
        assert 0 <= line.per_unit < math.inf


def test_an_unmeasured_node_looks_no_faster_than_its_measured_twin() -> None:
    """A node that serves is slower than its profile, so an idle decode node drew long prompts."""
    shared = MeasuredLine(default=DEFAULT)
    serving, idle = (MeasuredLine(PROFILE, shared=shared) for _ in range(2))
    serve(serving, 12, factor=1.5)
    idle.refresh()
    assert_near(serving, 1.5 * cpu_s(512), 512)
    assert idle.seconds(512) == pytest.approx(serving.seconds(512), rel=0.1)
    for _ in range(4):
        idle.measure(512, cpu_s(512))
    idle.refresh()
    assert idle.seconds(512) < 0.8 * serving.seconds(512)


def test_a_level_of_all_nodes_leaves_a_faster_machine_faster() -> None:
    shared = MeasuredLine(default=DEFAULT)
    fast = MeasuredLine(((1, 0.004), (512, 0.03)), shared=shared)
    serve(MeasuredLine(PROFILE, shared=shared), 20, factor=1.5)
    fast.refresh()
    assert_near(fast, 1.5 * (0.004 + 200 * 0.026 / 511), 200)
