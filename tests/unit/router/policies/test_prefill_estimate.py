"""Tests of the router's estimates for prompts and steps against simulated nodes.

Four kinds of load on two kinds of machine, on virtual time; a cold prefill node in each.
"""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from sim_node.executor import SimExecutor
from tests.fakes.router.prefill_estimate import LOADS, MACHINES, learnt, play, play_steps

pytestmark = pytest.mark.medium


@pytest.mark.parametrize("tells_steps", [True, False], ids=["profile", "old node"])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("machine", MACHINES)
def test_half_of_all_prompts_take_what_was_expected_within_a_quarter(
    machine: str, load: str, tells_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tells_steps:
        monkeypatch.setattr(SimExecutor, "step_times", lambda self: ())
    ratios = [one.ratio for one in learnt(play(load, MACHINES[machine]))]
    assert 0.8 <= statistics.median(ratios) <= 1.25
    assert statistics.fmean(0.8 <= ratio <= 1.25 for ratio in ratios) > 0.75


@pytest.mark.parametrize("tells_steps", [True, False], ids=["profile", "old node"])
@pytest.mark.parametrize("load", ["512", "waves"])
@pytest.mark.parametrize("machine", MACHINES)
def test_decode_steps_take_what_was_expected_within_a_quarter(
    machine: str, load: str, tells_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tells_steps:
        monkeypatch.setattr(SimExecutor, "decode_times", lambda self: ())
    ratios = play_steps(load, MACHINES[machine])
    if not tells_steps:  # the line begins with an estimate, and must learn
        ratios = ratios[len(ratios) // 4 :]
    assert statistics.fmean(0.8 <= ratio <= 1.25 for ratio in ratios) >= (
        1.0 if tells_steps else 0.9
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_turn_4_of_a_chat_goes_where_it_is_cheapest(machine: str) -> None:
    def ttft_s(*, local_prefill: bool) -> float:
        placed = learnt(play("chat", MACHINES[machine], local_prefill=local_prefill))
        return statistics.median(one.ttft_s for one in placed if one.turn == 4)

    assert ttft_s(local_prefill=True) <= 1.1 * ttft_s(local_prefill=False)
    fourth = [one for one in learnt(play("chat", MACHINES[machine])) if one.turn == 4]
    # On a CPU the decode node has the answers in its cache, and what is left is worth a second
    # node's help only where many tokens are.
    assert statistics.fmean(one.is_alone for one in fourth) >= (0.9 if machine == "cpu" else 0.0)


def test_turns_of_six_chats_stay_where_the_answers_are_cached() -> None:
    chats = dataclasses.replace(MACHINES["cpu"], num_chats=6, pause_s=2.0)
    placed = [one for one in learnt(play("chat", chats, num_requests=48)) if one.turn >= 4]
    assert statistics.fmean(one.is_alone for one in placed) >= 0.8


def test_no_node_is_starved_by_its_cold_first_prompt() -> None:
    placed = play("chat", MACHINES["cpu"])
    assert sum(not one.is_alone for one in placed[1:]) >= 2
