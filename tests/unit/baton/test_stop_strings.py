"""Unit tests of stop strings: the same end wherever the text or the tokens are cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.sampling_params import SamplingParams
from baton.text.stop_strings import OutputText, StopStrings
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)

# Few letters, so that beginnings of stop strings are frequent.
texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
cuts = st.lists(st.integers(0, 30), max_size=12)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


def by_definition(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Search letter by letter for the first place at which a stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(texts, stops, cuts)
def test_any_cut_of_the_text_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(piece) for piece in pieces_of(text, cuts)) + matcher.flush()
    assert (shown, matcher.stopped) == by_definition(text, stops)


@given(texts, stops, cuts)
def test_nothing_is_shown_that_may_become_a_stop_string_and_nothing_else_is_held(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, shown, seen = StopStrings(stops), "", ""
    for piece in pieces_of(text, cuts):
        shown += matcher.push(piece)
        seen += piece
        if matcher.stopped:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(
            stop.startswith(shown[start:] + held) for stop in stops for start in range(len(shown))
        )


def test_after_a_stop_string_nothing_is_shown() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.push(piece) for piece in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert matcher.stopped
    assert matcher.flush() == ""


def test_a_beginning_that_came_to_nothing_is_shown_in_the_end() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.push("a EN"), matcher.flush()] == ["a ", "EN"]
    assert not matcher.stopped


def test_of_two_the_first_to_be_complete_ends_the_text() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.push("xabcd") == "xa"


# ---------------------------------------------------------------- over tokens

SENTENCE = "for name in names:\n    print(name)  # \N{PARTY POPPER} done\n\nEND of it"


@given(
    st.sampled_from(["END", "\n\n", "\N{PARTY POPPER} d", "name in", "for", "of it", "nowhere"]),
    st.lists(st.integers(0, 40), max_size=8),
    st.booleans(),
)
def test_token_borders_do_not_matter(stop: str, cuts: list[int], ends_with_it: bool) -> None:
    token_ids = TOKENIZER.encode(SENTENCE)
    text = OutputText(TOKENIZER, SamplingParams(stop=(stop,)))
    borders = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    shown = ""
    for start, end in pairwise(borders):
        shown += text.push(token_ids[start:end], last=ends_with_it and end == len(token_ids))
    shown += text.push([], last=True)
    assert (shown, text.stopped) == by_definition(SENTENCE, [stop])
    # The last token is the one that completed it.
    before = TOKENIZER.decode(token_ids[: text.num_tokens - 1])
    assert stop not in before
    assert text.stopped or text.num_tokens == len(token_ids)


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 10])
def test_before_min_tokens_stop_strings_are_not_looked_for(min_tokens: int) -> None:
    token_ids = TOKENIZER.encode("a\n" * 12)
    text = OutputText(TOKENIZER, SamplingParams(stop=("\n",), min_tokens=min_tokens))
    shown = "".join(text.push([token_id]) for token_id in token_ids)
    assert text.stopped
    assert text.num_tokens >= min_tokens
    assert shown.count("\n") == TOKENIZER.decode(token_ids[: text.num_tokens]).count("\n") - 1


def test_without_stop_strings_the_text_is_the_decoded_output() -> None:
    token_ids = TOKENIZER.encode(SENTENCE)
    text = OutputText(TOKENIZER, SamplingParams())
    shown = "".join(text.push([token_id]) for token_id in token_ids) + text.push([], last=True)
    assert (shown, text.stopped, text.num_tokens) == (SENTENCE, False, len(token_ids))


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_long_stop_strings_cost_a_step_for_each_character(step: int) -> None:
    """Regression: 16 stop strings of 1,000 characters cost milliseconds per token."""
    search = StopStrings(["a" * (985 + i) + "b" for i in range(15)] + ["ab" * 500])
    text = "a" * 20_000
    began_at = time.process_time()
    shown = "".join(search.push(text[i : i + step]) for i in range(0, len(text), step))
    assert shown + search.flush() == text
    assert time.process_time() - began_at < 3
