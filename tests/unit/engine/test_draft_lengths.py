"""Unit tests of numbers of drafts: measured costs, acceptance rates, and the resulting choice."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine_config import EngineConfig
from engine.core.drafts import ALL
from engine.core.outputs import ScheduledRequest, SchedulerOutput, StepResult
from engine.core.request import Request
from engine.speculation.draft_lengths import (
    TRIAL_SHARE,
    TRIED,
    TRY_AFTER,
    Acceptance,
    DraftingCosts,
    StepCosts,
    Trials,
    choose_lengths,
    choose_num_drafts,
)
from engine.speculation.in_steps import InStepsProposer
from engine.speculation.speculation import Speculation
from tests.fakes.engine.engine_parts import make_request
from tests.unit.engine.test_speculation import NotingProposer, by_id, output


def costs_of(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_tokens, each in seconds.items():
        for _ in range(TRIED):
            costs.note(num_tokens, each)
    return costs


def test_costs_are_medians_and_lines_between_them() -> None:
    costs = costs_of({1: 1.0, 5: 3.0})
    for seconds in (1.0, 90.0, 1.0):
        costs.note(1, seconds)
    sizes = np.array([1, 2, 5, 7])
    assert costs.seconds(sizes).tolist() == [1.0, 1.5, 3.0, 4.0]


def test_a_size_that_was_not_tried_is_tried() -> None:
    assert StepCosts().seconds(np.array([1, 9])).tolist() == [1.0, 1.0]
    assert costs_of({4: 2.0}).seconds(np.array([4, 8, 90])).tolist() == [2.0, 2.0, 2.0]


def test_of_a_new_size_the_first_steps_which_prepare_for_it_count_for_little() -> None:
    costs = StepCosts()
    for seconds in (9.0, 5.0, 2.0):
        costs.note(6, seconds)
    assert costs.seconds(np.array([6])).tolist() == [2.0]


def test_a_size_counts_when_it_was_tried_often_enough_whatever_the_first_steps_took() -> None:
    costs = costs_of({1: 1.0})
    for seconds in (30.0, 9.0):
        costs.note(4, seconds)
        assert costs.seconds(np.array([4])).tolist() == [1.0]
    costs.note(4, 1.5)
    assert costs.seconds(np.array([4])).tolist() == [1.5]


def test_steps_without_drafts_are_measured_again_and_again() -> None:
    costs = costs_of({4: 1.0})
    assert not costs.is_fresh(1, gain=2.0)
    for _ in range(TRIED):
        costs.note(1, 1.0)
    for _ in range(50):
        costs.note(4, 1.0)
    assert costs.is_fresh(1, gain=2.0)
    assert not costs.is_fresh(1, gain=1.1)  # a slow moment may have made it seem so
    for _ in range(210):
        costs.note(4, 1.0)
    assert not costs.is_fresh(1, gain=2.0)
    assert costs.is_fresh(4, gain=1.1)


def test_a_slow_moment_is_seen_through_when_measured_anew() -> None:
    costs = costs_of({32: 10.0, 64: 20.0})
    for _ in range(8):
        costs.note(32, 40.0)
    for _ in range(TRIED):  # as often as is measured anew
        costs.note(32, 10.0)
    assert costs.seconds(np.array([32])).tolist() == [10.0]


def test_no_step_seems_to_take_longer_than_a_larger_one() -> None:
    costs = costs_of({32: 80.0, 40: 45.0, 64: 70.0})  # 32 in a slow moment
    assert costs.seconds(np.array([32, 40, 64])).tolist() == [45.0, 45.0, 70.0]
    lengths, choice = choose_lengths(costs, 32, [1] * 8, [0.5] * 8)
    assert sum(lengths) == choice.num_drafts
    assert choice.gain == (32 + 8 * 0.5) / 32  # and not twice as many tokens per second


def test_drafts_that_give_little_more_are_not_computed() -> None:
    """Drop drafts whose expected gain is below the variation of step times."""
    costs = costs_of({32: 40.0, 72: 84.0})
    assert choose_lengths(costs, 32, [5] * 8, [0.99] * 8)[1].num_drafts == 0
    assert choose_lengths(costs_of({32: 40.0, 72: 60.0}), 32, [5] * 8, [0.99] * 8)[1].num_drafts


def test_drafts_that_do_not_pay_are_tried_ever_more_rarely() -> None:
    trials = Trials()
    due = [step for step in range(8 * TRY_AFTER) if trials.is_due()]
    assert due[::TRIED] == [TRY_AFTER, 3 * TRY_AFTER + TRIED, 7 * TRY_AFTER + 2 * TRIED]
    trials.note_paid()
    assert [trials.is_due() for _ in range(TRY_AFTER + 1)].index(True) == TRY_AFTER


def test_a_trial_waits_for_somebody_to_draft_for() -> None:
    trials = Trials()
    assert not any(trials.is_due(lambda: False) for _ in range(2 * TRY_AFTER))
    assert trials.is_overdue
    assert [trials.is_due() for _ in range(TRIED + 1)] == [True] * TRIED + [False]
    assert not trials.is_overdue


def test_a_trial_that_takes_long_is_not_made_again_soon() -> None:
    trials = Trials()
    while not trials.is_due():
        pass
    trials.note_cost(40.0)
    silent = 0
    while trials.is_due() or silent < TRIED:  # the rest of that trial
        silent += 1
    while not trials.is_due():
        silent += 1
    assert silent >= 40 / TRIAL_SHARE


def test_what_many_drafts_took_before_there_was_a_tape_is_measured_again() -> None:
    drafting = DraftingCosts()
    for _ in range(4):
        assert not drafting.seconds(1, 5).any()  # tapes are made
        drafting.note(1, 5, 3.0)
        drafting.note(1, 2, 0.4)
    assert drafting.seconds(1, 5).tolist() == pytest.approx([0.0, 0.4, 0.4, 0.6, 0.8, 1.0])


def test_as_many_are_drafted_as_pay_with_the_cost_of_drafting() -> None:
    drafting = DraftingCosts()
    for _ in range(8):
        drafting.note(1, 3, 0.3)
    assert choose_num_drafts(FLAT, drafting, 1, 3, 0.9)[0] == 3
    assert choose_num_drafts(FLAT, drafting, 1, 3, 0.05)[0] == 0
    for _ in range(8):
        drafting.note(1, 3, 30.0)
    assert choose_num_drafts(FLAT, drafting, 1, 3, 0.9)[0] == 0


def test_the_slope_is_that_of_all_sizes_and_not_of_two_that_are_near() -> None:
    costs = costs_of({1: 1.0, 15: 1.0, 16: 1.5})
    assert costs.seconds(np.array([31])).tolist() == [2.0]


def test_what_was_measured_long_ago_is_forgotten() -> None:
    costs = costs_of({1: 1.0, 8: 50.0})
    for _ in range(4200):
        costs.note(1, 1.0)
    assert costs.seconds(np.array([1, 2])).tolist() == [1.0, 1.0]


def test_a_rate_follows_what_is_seen_and_begins_with_what_others_have() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(0.25) == 0.25
    for _ in range(100):
        acceptance.note(is_right=True)
    assert acceptance.rate(0.25) > 0.85
    for _ in range(30):
        acceptance.note(is_right=False)
    assert acceptance.rate(0.25) < 0.2


FLAT = costs_of({1: 1.0, 64: 1.0})
STEEP = costs_of({32: 32.0, 64: 64.0})


@pytest.mark.parametrize(
    ("costs", "num_rows", "num_drafts", "rates", "chosen"),
    [
        (FLAT, 1, [5], [0.9], [5]),  # tokens beside the first cost nothing
        (FLAT, 1, [5], [0.0], [0]),
        (STEEP, 32, [5], [0.9], [0]),  # each costs what a token costs that is surely right
        (costs_of({1: 1.0, 6: 2.0}), 1, [5], [0.9], [5]),
        (costs_of({1: 1.0, 6: 2.0}), 1, [5], [0.6], [2]),  # 1.6 / 1.2, 1.96 / 1.4, 2.18 / 1.6
        (costs_of({2: 1.0, 12: 3.0}), 2, [5, 5], [0.9, 0.1], [5, 0]),
        (costs_of({2: 1.0, 12: 3.0}), 2, [1, 3], [0.9, 0.9], [1, 3]),
    ],
)
def test_so_many_are_chosen_as_give_most_tokens_per_second(
    costs: StepCosts, num_rows: int, num_drafts: list[int], rates: list[float], chosen: list[int]
) -> None:
    lengths, choice = choose_lengths(costs, num_rows, num_drafts, rates)
    assert lengths == chosen
    assert choice.num_drafts == sum(chosen)
    assert f"{sum(chosen)} of {sum(num_drafts)} drafts paid" in str(choice)


def play(speculation: Speculation, request: Request, sampled: int, seconds: float) -> int:
    """A step that samples one token; how many drafts the next one is to compute."""
    scheduled = SchedulerOutput((ScheduledRequest(request, 1),), 1)
    speculation.note_step(scheduled, seconds)
    drafts = speculation.after_step(StepResult((output(request, sampled),)), by_id(request))
    return len(drafts.get(request.request_id, ()))


def test_who_begins_is_read_unless_no_drafts_have_paid_for_long() -> None:
    speculation = Speculation(
        InStepsProposer(EngineConfig()), 3, 10, adaptive=True, in_steps=True, drafter_reads=True
    )
    speculation._drafting_costs.note(1, 3, 0.1)
    assert speculation.num_to_draft(1) == 3
    speculation._costs = STEEP
    for _ in range(8):
        speculation._drafting_costs.note(32, 3, 90.0)
    read = []
    for _ in range(TRY_AFTER + 1):
        assert speculation.num_to_draft(32, lambda: False) == 0
        read.append(speculation.num_to_read())
    num_all = read.count(ALL)
    assert 32 < num_all < 128
    assert read == [ALL] * num_all + [0] * (TRY_AFTER - num_all) + [1], "one for a trial"
    assert speculation.num_to_draft(32) == 3
    assert speculation.num_to_read() == 0
    speculation._costs, speculation._drafting_costs = FLAT, DraftingCosts()
    speculation.num_to_draft(1)
    assert speculation.num_to_read() == ALL


def test_now_and_then_one_draft_more_is_computed_than_seems_to_pay() -> None:
    speculation = Speculation(InStepsProposer(EngineConfig()), 5, 10, adaptive=True, in_steps=True)
    speculation._costs = costs_of({1: 1.0, 4: 1.0, 5: 9.0})  # a slow moment
    for _ in range(8):
        speculation._drafting_costs.note(1, 5, 0.1)
    assert [speculation.num_to_draft(1) for _ in range(140)].count(4) == TRIED
    for _ in range(5):
        speculation._costs.note(5, 1.0)
        speculation._costs.note(6, 1.0)
    assert [speculation.num_to_draft(1) for _ in range(140)][8:] == [5] * 132


def test_drafts_that_are_not_computed_are_looked_at_and_come_back_when_they_are_right() -> None:
    speculation = Speculation(NotingProposer(EngineConfig()), 3, 10, adaptive=True)
    speculation._costs = costs_of({1: 1.0, 4: 1.6})
    request = make_request("a", 4, max_tokens=10_000)
    assert play(speculation, request, 7, 1.0) > 0
    lengths = [play(speculation, request, 2, 1.0) for _ in range(40)]  # never what was drafted
    assert lengths[-1] == 0
    lengths = [play(speculation, request, 7, 1.0) for _ in range(40)]
    assert lengths[0] == 0
    assert lengths[-1] == 3
