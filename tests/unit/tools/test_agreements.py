"""Comparisons with other programs: what counts as agreement, and that all are asked the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module(f"benchmarks.loadtest.{name}")


def task(score: float, *judged: Any) -> dict[str, Any]:
    """Return what one side says about a task."""
    samples = [{"id": i, "answers": one, "judged": one} for i, one in enumerate(judged)]
    return {"scores": {"acc": score}, "samples": samples}


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("lm_eval_agreement", monkeypatch)


def test_log_likelihoods_within_the_limit_agree(lm_eval: Any) -> None:
    ours = task(0.5, [[-1.0, True], [-2.0, False]], [[-3.0, False], [-2.5, False]])
    theirs = task(0.5, [[-1.00009, True], [-2.0, False]], [[-3.0, False], [-2.5, False]])
    found = lm_eval.compare(ours, theirs)
    assert lm_eval.agrees(found)
    assert found["num_logprobs"] == 4
    assert found["largest_logprob_difference"] == pytest.approx(9e-5)


@pytest.mark.parametrize(
    "theirs",
    [
        task(0.5, [[-1.0002, True], [-2.0, False]]),  # too far
        task(0.5, [[-2.0, True], [-1.0, False]]),  # another answer is the best one
        task(0.4, [[-1.0, True], [-2.0, False]]),  # another accuracy
    ],
)
def test_what_differs_does_not_agree(lm_eval: Any, theirs: dict[str, Any]) -> None:
    ours = task(0.5, [[-1.0, True], [-2.0, False]])
    assert not lm_eval.agrees(lm_eval.compare(ours, theirs))


def test_texts_that_are_judged_otherwise_do_not_agree(lm_eval: Any) -> None:
    found = lm_eval.compare(task(0.5, ["Paris"], ["Rome"]), task(0.5, ["Paris"], ["Oslo"]))
    assert (found["num_judged_otherwise"], found["num_other_texts"]) == (1, 1)
    assert not lm_eval.agrees(found)


def test_sides_with_other_samples_are_not_compared(lm_eval: Any) -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        lm_eval.compare(task(0.5, ["a"], ["b"]), task(0.5, ["a"]))


@pytest.fixture
def agreement(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("loadtest_agreement", monkeypatch)


def test_medians_are_as_far_apart_as_the_largest_is_above_the_smallest(agreement: Any) -> None:
    runs = {"baton": [1.0, 9.0, 2.0], "aiperf": [2.2, 2.2, 1.0], "guidellm": [2.1, 2.1, 2.1]}
    found = agreement.compared({who: [{"x": x} for x in xs] for who, xs in runs.items()})
    assert found == {"x": {"baton": 2.0, "aiperf": 2.2, "guidellm": 2.1, "apart": 0.1}}


def test_all_reports_are_read_into_the_same_numbers(agreement: Any, tmp_path: Path) -> None:
    """Seconds of ours, and of guidellm's E2E, are milliseconds of the comparison."""
    times = {"mean": 0.5, "p50": 0.4}
    ours = {"latencies": {f"{name}_s": times for name in ("ttft", "tpot", "e2e")}}
    rates = {"requests_per_s": 4.0, "output_tokens_per_s": 128.0, "num_ok": 32}
    (tmp_path / "result.json").write_text(json.dumps({"summary": ours | rates}))
    by_baton = agreement.baton_numbers(tmp_path)

    latencies = ("time_to_first_token", "inter_token_latency", "request_latency")
    aiperf: dict[str, Any] = {name: {"avg": 500.0, "p50": 400.0} for name in latencies}
    counts = {"request_throughput": 4.0, "output_token_throughput": 128.0, "request_count": 32}
    document = aiperf | {name: {"avg": value} for name, value in counts.items()}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(document))
    assert agreement.aiperf_numbers(tmp_path) == by_baton

    metrics: dict[str, Any] = {
        "time_to_first_token_ms": {"mean": 500.0, "median": 400.0},
        "inter_token_latency_ms": {"mean": 500.0, "median": 400.0},
        "request_latency": {"mean": 0.5, "median": 0.4, "count": 32},
        "requests_per_second": {"mean": 4.0},
        "output_tokens_per_second": {"mean": 128.0},
    }
    benchmark = {"metrics": {name: {"successful": value} for name, value in metrics.items()}}
    (tmp_path / "result.json").write_text(json.dumps({"benchmarks": [benchmark]}))
    assert agreement.guidellm_numbers(tmp_path) == by_baton


def test_a_text_has_as_many_tokens_as_words_and_each_token_has_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet = load("loadtest_fleet", monkeypatch)
    words = fleet.write_model(tmp_path / "model")
    tokenizer = Tokenizer(tmp_path / "model")
    [text] = fleet.fresh_texts(words, 1, 200)
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == 200
    assert len(tokenizer.encode(f"[3fa1c29b] {text}")) == 201  # as the load test marks a prompt
    assert tokenizer.decode(token_ids) == text
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert all(tokenizer.decode([one]) for one in range(config["vocab_size"]))
