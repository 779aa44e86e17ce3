"""Unit tests of StepStretch: steps beside prompts stay within a limit, by measured times alone."""

from __future__ import annotations

import random
import statistics

import pytest

from engine.step_stretch import StepStretch


def run_steps(
    stretch: StepStretch, decode_s: float, token_s: float, *, noise: float = 0.0, most: int = 4096
) -> list[float]:
    """Return how many times as long as decodes alone steps beside prompts were."""
    draw, found = random.Random(1), list[float]()
    for _ in range(20):
        for _ in range(10):
            stretch.note_step(0, decode_s * draw.uniform(1 - noise, 1 + noise))
        for _ in range(5):
            num_tokens = min(stretch.num_tokens(), most)
            seconds = (decode_s + token_s * num_tokens) * draw.uniform(1 - noise, 1 + noise)
            stretch.note_step(num_tokens, seconds)
            found.append(seconds / decode_s)
    return found


@pytest.mark.parametrize("token_s", [0.0002, 0.001, 0.00001])
def test_steps_beside_a_prompt_fill_the_limit_and_stay_within(token_s: float) -> None:
    stretch = StepStretch(1.5, least=1)
    ratios = run_steps(stretch, 0.02, token_s)
    assert max(ratios) <= 1.5
    assert statistics.median(ratios[20:]) > 1.3


def test_noise_does_not_move_the_number_of_tokens_far() -> None:
    stretch = StepStretch(1.5, least=1)
    ratios = sorted(run_steps(stretch, 0.02, 0.0005, noise=0.1))
    assert 1.25 < statistics.median(ratios) < 1.5
    assert ratios[int(0.95 * len(ratios))] < 1.75


def test_a_step_has_the_least_tokens_until_both_kinds_of_steps_are_measured() -> None:
    stretch = StepStretch(1.5, least=8)
    assert stretch.num_tokens() == 8
    stretch.note_step(64, 0.1)  # says nothing without a step that only decodes
    assert stretch.num_tokens() == 8
    stretch.note_step(0, 0.02)
    assert stretch.num_tokens() == 8
    stretch.note_step(8, 0.0201)
    assert stretch.num_tokens() == 16


def test_a_step_has_the_least_tokens_where_no_number_keeps_the_limit() -> None:
    stretch = StepStretch(1.5, least=8)
    assert run_steps(stretch, 0.001, 0.001) == pytest.approx([9.0] * 100)


def test_tokens_that_seem_to_take_no_time_let_the_number_grow_only_by_and_by() -> None:
    stretch = StepStretch(1.5, least=8)
    stretch.note_step(0, 0.02)
    stretch.note_step(8, 0.015)
    assert stretch.num_tokens() == 16
    stretch.note_step(4, 0.015)
    assert stretch.num_tokens() == 8


def test_one_odd_step_changes_the_number_by_a_fifth() -> None:
    stretch = StepStretch(1.5, least=1)
    run_steps(stretch, 0.02, 0.0005)
    before = stretch.num_tokens()
    stretch.note_step(before, 5.0)
    stretch.note_step(0, 5.0)
    assert 0.7 * before <= stretch.num_tokens() <= 1.3 * before
