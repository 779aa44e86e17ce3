"""Unit tests of ThoughtState: the tokens alone decide which tokens may follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.prompt import check_sampling_params
from baton.api.sampling_params import SamplingParams
from baton.api.thinking import Thinking
from baton.text.thoughts.state import NO_LIMIT, Phase, ThoughtState

OPEN, CLOSE, END, GAP = 50, 51, 52, 53


def state_of(*tokens: int, guides: bool = True, **fields: Any) -> ThoughtState:
    given = {"close_token_ids": (CLOSE,), "open_marks": ((OPEN,),), **fields}
    state = ThoughtState(Thinking(**given), guides_answer=guides)
    for token_id in tokens:
        state.accept(token_id)
    return state


def run(state: ThoughtState, rng: random.Random, num_tokens: int) -> list[int]:
    """Draw tokens as a model would that knows no marks, within what is allowed."""
    drawn: list[int] = []
    while len(drawn) < num_tokens:
        choices = () if state.num_free else state.choices
        token_id = rng.choice(choices) if choices else rng.randrange(10)
        drawn.append(token_id)
        if not state.accept(token_id) and state.phase is Phase.OVER:
            break
    return drawn


@pytest.mark.parametrize("close", [(CLOSE,), (1, 2, 1), (3, 3), (4, 5, 4, 5, 6)])
@pytest.mark.parametrize("guides", [True, False])
def test_a_thought_never_has_more_tokens_than_its_budget(
    close: tuple[int, ...], guides: bool
) -> None:
    """A mark that the model has begun itself counts as the mark, once it is whole."""
    rng, lengths = random.Random(3), set()
    for _ in range(400):
        budget = rng.randrange(9)
        state = state_of(close_token_ids=close, is_open=True, budget_tokens=budget, guides=guides)
        drawn = run(state, rng, 40)
        ends = [i for i in range(len(drawn)) if tuple(drawn[i : i + len(close)]) == close]
        assert ends
        assert ends[0] <= budget
        lengths.add(budget - ends[0])
    assert 0 in lengths  # the whole budget may be used


def test_the_state_follows_from_the_tokens_alone() -> None:
    rng = random.Random(4)
    for _ in range(100):
        fields: dict[str, Any] = {
            "close_token_ids": (7, 8),
            "budget_tokens": rng.randrange(5),
            "is_open": rng.random() < 0.5,
            "must_open": rng.random() < 0.5,
            "behind_token_ids": (60, 61) if rng.random() < 0.5 else (),
        }
        state = state_of(**fields)
        drawn = run(state, rng, rng.randrange(12))
        again = state_of(*drawn, **fields)
        assert (again.phase, again.num_tokens, again.num_free) == (
            state.phase, state.num_tokens, state.num_free,
        )  # fmt: skip
        assert list(again.choices) == list(state.choices)


@pytest.mark.parametrize(
    ("tokens", "fields", "phase", "choices", "may_answer"),
    [
        ((), {}, Phase.OPENING, [OPEN], True),
        ((), {"must_open": True}, Phase.OPENING, [OPEN], False),
        ((), {"open_marks": ((OPEN,), (GAP, OPEN))}, Phase.OPENING, [OPEN, GAP], True),
        ((GAP,), {"open_marks": ((OPEN,), (GAP, OPEN))}, Phase.OPENING, [OPEN], False),
        ((OPEN,), {}, Phase.OPEN, [], False),
        ((OPEN, 1, 2), {"budget_tokens": 2}, Phase.OPEN, [CLOSE], False),
        ((OPEN, 1, CLOSE), {}, Phase.GAP, [], True),
        ((OPEN, CLOSE), {"gap_token_ids": (GAP,)}, Phase.GAP, [GAP], True),
        ((OPEN, CLOSE, GAP), {"gap_token_ids": (GAP,)}, Phase.OVER, [], True),
        ((OPEN, CLOSE, 5), {"gap_token_ids": (GAP,)}, Phase.OVER, [], True),
        ((OPEN, CLOSE), {"behind_token_ids": (8, 9)}, Phase.BEHIND, [8], False),
        ((OPEN, CLOSE, 8, 9), {"behind_token_ids": (8, 9)}, Phase.GAP, [], True),
        ((5,), {}, Phase.OVER, [], True),
    ],
)  # fmt: skip
def test_what_may_come_before_a_grammar(
    tokens: Sequence[int],
    fields: dict[str, Any],
    phase: Phase,
    choices: list[int],
    may_answer: bool,
) -> None:
    state = state_of(*tokens, **fields)
    assert (state.phase, list(state.choices), state.may_answer) == (phase, choices, may_answer)
    assert state.num_free == (1 if phase is Phase.OPEN and not choices else 0)


@pytest.mark.parametrize(
    ("tokens", "fields", "num_free"),
    [
        ((), {"is_open": True}, 5),
        ((1, 2), {"is_open": True}, 3),
        ((1, 2, 3, 4, 5), {"is_open": True}, 0),
        ((1, CLOSE), {"is_open": True}, NO_LIMIT),
        ((), {}, 6),
        ((), {"must_open": True}, 0),
        ((1,), {}, NO_LIMIT),
        ((OPEN, 1), {}, 4),
        ((OPEN, 1, CLOSE), {"may_reopen": True}, 5),
        ((OPEN, 1, CLOSE, OPEN, 1), {"may_reopen": True}, 3),
        ((OPEN, 1, 2, 3, 4, 5, CLOSE, 9), {"may_reopen": True}, 1),
    ],
)
def test_without_a_grammar_only_the_end_of_a_budget_needs_a_mask(
    tokens: Sequence[int], fields: dict[str, Any], num_free: int
) -> None:
    assert state_of(*tokens, guides=False, budget_tokens=5, **fields).num_free == num_free


def test_limits_name_their_field() -> None:
    with pytest.raises(InvalidRequestError, match=r"^thinking.budget_tokens: must be a whole num"):
        Thinking(budget_tokens=-1)
    with pytest.raises(InvalidRequestError, match=r"^thinking.close_token_ids: must be token ids"):
        Thinking(close_token_ids=(-1,))
    with pytest.raises(InvalidRequestError, match=r"^thinking: must be a Thinking, got int"):
        SamplingParams(thinking=5)  # type: ignore[arg-type]  # on purpose
    marked = Thinking(close_token_ids=(CLOSE,), is_open=True)
    for field, params in {
        "banned_token_ids": SamplingParams(thinking=marked, banned_token_ids=(CLOSE,)),
        "allowed_token_ids": SamplingParams(thinking=marked, allowed_token_ids=(1, 2)),
        "thinking.close_token_ids": SamplingParams(
            thinking=Thinking(close_token_ids=(99,), is_open=True)
        ),
        "thinking": SamplingParams(thinking=Thinking(budget_tokens=1)),
    }.items():
        with pytest.raises(InvalidRequestError, match=f"^{field}: "):
            check_sampling_params(params, vocab_size=60)
