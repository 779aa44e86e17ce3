"""Unit tests of grammars: linear checks, and trials that refuse what would cost too much."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import is_lark_syntax

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import MAX_TEXT_BYTES, StructuredOutput
from baton.text.grammar_trials import GrammarTrials
from baton.text.grammars import _LARK, make_grammar
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = pytest.mark.medium

# Readers of quadratic time took a minute.
LINEAR_S = 5.0


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(DEMO_MODEL)
    yield trials
    trials.close()


@pytest.mark.parametrize(
    "filler", ["\n", " ", "\t\n", "a", "a\n", "start \n", "start", "%", "a ::"]
)
def test_a_grammar_is_looked_at_in_time_that_grows_with_its_length_only(filler: str) -> None:
    tail = "?"  # what the blanks lead to is no rule: so each of them was tried as a beginning
    text = filler * ((MAX_TEXT_BYTES - len(tail) - 1) // len(filler)) + "\n" + tail
    began_at = time.process_time()
    with contextlib.suppress(Exception):  # what the library says of it, or too many rules
        make_grammar(StructuredOutput(grammar=text))
    assert time.process_time() - began_at < LINEAR_S


@given(st.lists(st.sampled_from(["start", ":", " ", "\n", "\r", "a", "%llguidance", "x", "::="])))
def test_lark_is_told_from_gbnf_as_the_library_does_it(parts: list[str]) -> None:
    text = "".join(parts)
    assert bool(_LARK.search(text)) == is_lark_syntax(text)


HOSTILE = {
    "a large divisor": StructuredOutput(json_schema='{"type":"integer","multipleOf":99999989}'),
    "many divisors": StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {
                f"p{i}": {"type": "integer", "multipleOf": 9001 + i} for i in range(900)
            },
        }
    ),
    "a schema in a grammar": StructuredOutput(
        grammar='start: %json {"type":"integer","multipleOf":99999989}'
    ),
    "repeats of repeats": StructuredOutput(regex="((((a{1000}){1000}){1000}){1000}){100}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_costs_too_much_is_refused_by_field_and_limit(
    trials: GrammarTrials, name: str
) -> None:
    """On the nodes it took gigabytes, and then the process."""
    hostile = HOSTILE[name]
    with pytest.raises(
        InvalidRequestError,
        match=rf"^structured_output\.{hostile.kind}: takes more than 1 s of processor time or 96",
    ):
        asyncio.run(trials.run(hostile))


def test_what_is_well_passes_beside_it(trials: GrammarTrials) -> None:
    async def main() -> None:
        hostile = [
            asyncio.create_task(
                trials.run(
                    StructuredOutput(
                        json_schema=f'{{"type":"integer","multipleOf":{99999989 + i}}}'
                    ),
                    caller="hog",
                )
            )
            for i in range(6)
        ]
        for i in range(10):
            trial = await trials.run(StructuredOutput(choice=("yes", f"no{i}")), caller="other")
            assert trial.grammar
        assert not all(task.done() for task in hostile)  # two at a time, a second each
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    "structured_output",
    [
        StructuredOutput(json_object=True),
        StructuredOutput(choice=("a", "b")),
        StructuredOutput(regex="[a-z]{1,9}"),
        StructuredOutput(grammar='root ::= "a" | root "b"'),
        StructuredOutput(grammar='start: "a" start | "b"'),
        StructuredOutput(json_schema={"type": "array", "items": {"enum": [1, 2]}, "maxItems": 999}),
        # As many rules as may be, one within the other.
        StructuredOutput(
            grammar="start: r0\n"
            + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(990))
            + 'r990: "y"'
        ),
    ],
    ids=lambda one: one.kind,
)
def test_trials_give_what_the_library_reads(
    trials: GrammarTrials, structured_output: StructuredOutput
) -> None:
    trial = asyncio.run(trials.run(structured_output))
    assert trial.grammar == make_grammar(structured_output)


def test_what_is_wrong_is_said_in_the_words_of_the_library(trials: GrammarTrials) -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured_output\.regex: "):
        asyncio.run(trials.run(StructuredOutput(regex="(")))


def test_a_checkpoint_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    trials = GrammarTrials(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"has no tokenizer\.json"):
        asyncio.run(trials.run(StructuredOutput(regex="a")))
    trials.close()
