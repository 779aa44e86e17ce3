"""The table of answers to ten plain questions in docs/models.md."""

from __future__ import annotations

from tests.fakes.answers.plain_questions import QUESTIONS
from tests.fakes.answers.questions_table import BEGIN, END, PAGE, table, write

RIGHT = [one.right[0] for one in QUESTIONS]


def test_wrong_answers_are_marked_and_right_ones_counted() -> None:
    lines = table({"one": RIGHT, "other": ["Oslo,\na | b", *RIGHT[1:]]}).splitlines()
    assert lines[0] == "| question | one | other |"
    assert lines[2] == f"| {QUESTIONS[0].text} | paris | **wrong:** Oslo, a \\| b |"
    assert lines[-1] == "| right | 10 of 10 | 9 of 10 |"


def test_the_table_replaces_the_one_between_the_marks() -> None:
    page = PAGE.read_text(encoding="utf-8")
    written = write(page, "new")
    assert f"{BEGIN}\nnew\n{END}" in written
    before, _, _ = page.partition(BEGIN)
    assert written.startswith(before)
