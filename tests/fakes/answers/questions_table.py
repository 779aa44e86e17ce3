"""Asks models the ten plain questions, and writes the table of their answers in docs/models.md.

    python -m tests.fakes.answers.questions_table NAME=FILE [NAME=FILE ...]

Each model answers in a process of its own, with the weights as its file has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fakes.answers.plain_questions import QUESTIONS, is_right

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/fakes/answers/questions_table.py -->", "<!-- end -->"


def answers_of(file: str) -> list[str]:
    """Return a model's answers to the ten questions.

    Raises subprocess.CalledProcessError if the model cannot be loaded.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.answers.plain_questions", file],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])["answers"]
    return answers


def table(answers: Mapping[str, Sequence[str]]) -> str:
    """Return a row per question and a column per model; the last row counts right answers."""
    lines = [f"| question | {' | '.join(answers)} |", "|---" * (len(answers) + 1) + "|"]
    for index, question in enumerate(QUESTIONS):
        texts = [given[index] for given in answers.values()]
        cells = [_cell(text, is_right=is_right(question, text)) for text in texts]
        lines.append(f"| {question.text} | {' | '.join(cells)} |")
    counts = [
        sum(is_right(one, text) for one, text in zip(QUESTIONS, given, strict=True))
        for given in answers.values()
    ]
    lines.append(f"| right | {' | '.join(f'{n} of {len(QUESTIONS)}' for n in counts)} |")
    return "\n".join(lines)


def _cell(text: str, *, is_right: bool) -> str:
    shown = " ".join(text.split()).replace("|", "\\|")
    return shown if is_right else f"**wrong:** {shown}"


def write(page: str, lines: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, "the page has no place for the table"
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


def main(words: Sequence[str]) -> None:
    """Ask the models that are named, and write the page."""
    files = dict(word.split("=", 1) for word in words)
    found = {name: answers_of(file) for name, file in files.items()}
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8"), table(found)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
