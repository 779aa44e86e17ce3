"""Unit tests of the figures of chats: what a scale means, what is counted, and the bounds."""

from __future__ import annotations

import pytest

from benchmarks.router.chat_figures import ratios, summarize, transpose
from benchmarks.router.chat_places import SCALED_SHAPES, SHAPES, Options
from benchmarks.router.chat_turns import Measured, Turn

NUM_TURNS = 5


def run_of(computed: int, ttft_ms: float, seconds: float) -> Measured:
    """Return a run of one chat whose turns have 100 new tokens and answers of 40."""
    rows = [
        Turn(
            session=0,
            turn=turn,
            place="p0 d0" if turn % 2 else "- d0",
            num_prompt=140 * turn - 40,
            num_cached=140 * turn - 40 - computed,
            num_computed=computed,
            num_reusable=140 * (turn - 1),
            ttft_ms=ttft_ms + turn,
            gap_p50_ms=20.0,
            gap_max_ms=30.0,
            num_output=40,
        )
        for turn in range(1, NUM_TURNS + 1)
    ]
    return Measured(rows, seconds)


def test_the_first_turns_do_not_count() -> None:
    found = summarize([run_of(104, 300, 10), run_of(104, 500, 10)], NUM_TURNS)
    assert found["later_turns"] == 4
    assert found["later_turns_alone"] == 2
    assert found["ttft_p50_later_ms"] == (305 + 504) / 2
    assert (found["computed_per_later_turn"], found["new_per_later_turn"]) == (104, 100)
    assert found["later_turns_with_more_than_new"] == 0
    assert found["output_tokens_per_s"] == 2 * NUM_TURNS * 40 / 20


def test_shapes_are_compared_beside_their_bounds() -> None:
    runs = {"2:2": run_of(140, 1000, 20), "2:2+fetch": run_of(100, 500, 16)}
    runs |= {"llamacpp": run_of(100, 250, 10)}
    results = {shape: summarize([one], NUM_TURNS) for shape, one in runs.items()}
    assert results["2:2"]["later_turns_with_more_than_new"] == 2
    found = ratios(results)
    assert list(found) == ["2:2+fetch / 2:2", "2:2 / llamacpp", "2:2+fetch / llamacpp"]
    fetched = found["2:2+fetch / 2:2"]
    assert fetched["output_tokens_per_s"] == 20 / 16
    assert fetched["output_tokens_per_s_at_most"] == 1.4
    assert fetched["ttft_without_waits_at_least"] == pytest.approx(1 / 1.4, abs=1e-3)
    assert fetched["ttft_p50_later"] == pytest.approx(0.5, abs=0.01)
    assert found["2:2+fetch / llamacpp"]["output_tokens_per_s_at_most"] == 1.0
    assert transpose(found)["output_tokens_per_s"]["2:2+fetch / 2:2"] == 20 / 16


def test_a_scale_sets_the_tokens_of_a_turn() -> None:
    options = Options(scale=0.2, sessions=24).complete()
    assert (options.words, options.output_tokens, options.shapes) == (200, 80, SCALED_SHAPES)
    assert Options().complete().shapes == SHAPES
    assert Options(scale=1.0, turns=5).complete().words == 1000
    with pytest.raises(SystemExit, match="turns: a chat must have at most 8192 tokens, got 12320"):
        Options(scale=1.0).complete()
