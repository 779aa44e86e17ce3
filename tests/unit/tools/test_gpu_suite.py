"""How the GPU suite shares out its time, and what it reads of pytest's output."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import engine
from baton.api.errors import ConfigError
from benchmarks.gpu import gpu_unseen
from benchmarks.gpu.gpu_report import CannotRunError, Report
from tests.numerics.vision_checkpoints import VISION_FAMILIES

gpu_suite = importlib.import_module("benchmarks.gpu.gpu_suite")
ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
THERE = {"torch", "numpy"}  # on any machine with a GPU
NOT_IMPORTED = {"gguf", "pillow"}  # but for files of their kinds


@pytest.fixture(params=["gpu_suite", "gpu_first"])
def suite(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"benchmarks.gpu.{request.param}")


def spend(suite: ModuleType, budget_s: float, used: dict[str, float]) -> dict[str, float]:
    """The limit of each part, where each takes all of its limit unless said otherwise."""
    limits, left_s = {}, budget_s
    shares = [part.share_s for part in suite.PARTS.values()]
    for index, name in enumerate(suite.PARTS):
        limits[name] = gpu_suite.limit_of(shares[index:], left_s)
        left_s -= min(used.get(name, limits[name]), limits[name])
    assert left_s >= -1e-6
    return limits


def test_every_part_is_reached_though_all_are_too_slow(suite: ModuleType) -> None:
    limits = spend(suite, suite.BUDGET_S, {})
    assert limits == pytest.approx({name: part.share_s for name, part in suite.PARTS.items()})
    halved = spend(suite, suite.BUDGET_S / 2, {})
    assert halved == pytest.approx({name: limit / 2 for name, limit in limits.items()})


def test_what_one_part_leaves_the_next_may_use() -> None:
    limits = spend(gpu_suite, gpu_suite.BUDGET_S, {"engine": 10.0, "decode": 30.0})
    shares = {name: part.share_s for name, part in gpu_suite.PARTS.items()}
    assert limits["graphs"] == shares["graphs"] + shares["engine"] - 10
    assert limits["push"] == shares["push"] + shares["decode"] - 30
    assert limits["ops"] == shares["ops"]  # those between have used it


def test_a_lent_gpu_runs_the_first_parts_in_less_than_ten_minutes(suite: ModuleType) -> None:
    assert suite.BUDGET_S < 600
    for part in suite.PARTS.values():
        module = importlib.import_module(f"benchmarks.gpu.{part.module}")
        assert callable(getattr(module, part.function))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tests/kernels/test_norm.py::test_a[x y] PASSED [ 5%]", ("test_a[x y]", "PASSED")),
        ("[gw3] [ 12%] FAILED tests/kernels/test_norm.py::test_a[x y] ", ("test_a[x y]", "FAILED")),
        ("[gw0] [100%] SKIPPED tests/kernels/test_norm.py::test_b", ("test_b", "SKIPPED")),
        ("tests/kernels/test_norm.py::test_a[x y] ", None),
        ("FAILED tests/kernels/test_norm.py::test_a - AssertionError", None),
    ],
)
def test_outcomes_are_read_from_one_process_and_from_several(
    line: str, expected: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module("benchmarks.gpu.gpu_tokens").outcome_of(line)
    if expected is None:
        assert found is None
    else:
        assert found == (f"tests/kernels/test_norm.py::{expected[0]}", expected[1])


def test_the_wheelhouse_brings_what_nodes_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["node"]
    names = {re.split(r"[^\w-]", line)[0].replace("_", "-") for line in wanted}
    script = (ROOT / "tools" / "gpu_wheelhouse.sh").read_text(encoding="utf-8")
    lists = re.findall(r'^(?:engine|nodes|nixl)="([^"]*)"', script, re.MULTILINE)
    assert names - THERE - NOT_IMPORTED - set(" ".join(lists).split()) == set()


def test_drawn_weights_are_loaded_with_all_that_an_engine_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from models import load_model

    drawn = importlib.import_module("benchmarks.gpu.gpu_models")._load
    assert list(inspect.signature(drawn).parameters) == list(
        inspect.signature(load_model).parameters
    )


def test_on_a_gpu_models_that_read_only_text_there_are_not_given_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "Gemma3ForConditionalGeneration"
    of_one = {name: VISION_FAMILIES[name]}
    monkeypatch.setattr("tests.numerics.vision_checkpoints.VISION_FAMILIES", of_one)
    monkeypatch.setattr(gpu_unseen, "_equal_prompts", lambda *_: 0)
    assert gpu_unseen.check_images("cuda", Report(tmp_path / "report.json"))
    assert not gpu_unseen.check_images("cpu", Report(tmp_path / "report.json"))


def test_adapters_that_a_gpu_refuses_are_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("max_adapters: adapters are computed on a CPU")

    monkeypatch.setattr(engine, "LLM", refuse)
    with pytest.raises(CannotRunError, match="max_adapters"):
        gpu_unseen.check_adapters("cuda", Report(tmp_path / "report.json"))
