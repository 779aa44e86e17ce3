"""A small part of the drawn forms: `python -m tests.fuzz.drawn_forms` runs the rest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.drawn_forms import FORMS, DrawnForms

pytestmark = pytest.mark.medium


@pytest.mark.parametrize(
    ("family", "by"), [("qwen3_coder", "engine"), ("gpt_oss", "states"), ("glm45", "states")]
)
def test_drawn_answers_fit_behind_thoughts_that_keep_their_budgets(
    family: str, by: str, tmp_path: Path
) -> None:
    forms, total = DrawnForms(family, tmp_path, seed=1, by=by), Counter[str]()
    for form in FORMS:
        counts, faults = forms.run(form, range(3))
        assert not faults
        total.update(counts)
    assert total["outputs"] - total["cut"] >= 20
    assert total["thoughts"] >= 8
    assert total["calls"] >= 5
