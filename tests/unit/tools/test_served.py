"""Tests of served benchmarks: the generator's file, the tokenizer, and the verdicts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from baton.text.tokenizer import Tokenizer
from benchmarks.page.page import Outcome
from benchmarks.served.rows import SERVED, best_shape, over_best_peer

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RESULT = {
    "output_throughput": 201.504,
    "median_ttft_ms": 1189.0,
    "p99_ttft_ms": 2309.0,
    "median_itl_ms": 52.3,
    "p99_itl_ms": 1097.0,
    "completed": 60,
    "failed": 0,
    "total_output_tokens": 3840,
    "request_throughput": 3.1,
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("benchmarks.served.served")


def test_a_result_is_kept_in_our_words(served: Any) -> None:
    assert served.read_result(RESULT) == {
        "output_tokens_per_s": 201.5,
        "ttft_p50_ms": 1189.0,
        "ttft_p99_ms": 2309.0,
        "itl_p50_ms": 52.3,
        "itl_p99_ms": 1097.0,
        "num_completed": 60,
        "num_failed": 0,
        "num_output_tokens": 3840,
    }


def test_a_result_that_lacks_a_number_is_refused_by_its_name(served: Any) -> None:
    lacking = {key: value for key, value in RESULT.items() if key != "p99_itl_ms"}
    with pytest.raises(KeyError, match="p99_itl_ms"):
        served.read_result(lacking)


def test_medians_are_of_rounds_and_failures_of_all(served: Any) -> None:
    runs = [
        served.read_result(RESULT | {"median_ttft_ms": ttft, "failed": failed})
        for ttft, failed in ((30.0, 0), (10.0, 2), (20.0, 1))
    ]
    medians = served.summarize({"vllm": {"4": runs}, "baton split": {"4": runs, "1": runs[:1]}})
    assert list(medians) == ["1", "4"]
    assert medians["4"]["vllm"]["ttft_p50_ms"] == 20.0
    assert medians["4"]["vllm"]["num_failed"] == 3
    assert medians["1"]["baton split"]["rounds"] == 1


def test_no_two_runs_of_a_server_have_one_seed(served: Any) -> None:
    seeds = [served.seed_of(number, rate) for number in range(9) for rate in (0.5, 1.0, 4.0)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"servers": ["baton split", "sglang"]}, "servers: must be of .*, got 'sglang'"),
        ({"rates": [1.0, 0.0]}, "rates: must be above 0, got 0"),
    ],
)
def test_what_is_no_server_or_rate_is_refused(
    served: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        served.Options(**given)


@pytest.mark.parametrize("vocab_size", [1000, 32768])
def test_a_text_of_tokens_is_read_as_them(served: Any, tmp_path: Path, vocab_size: int) -> None:
    served_servers = importlib.import_module("benchmarks.served.served_servers")
    served_servers.write_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer(tmp_path)
    first = len(served_servers.SPECIALS) + 256
    drawn = list(range(first, vocab_size, max(1, vocab_size // 500)))
    assert tokenizer.encode(tokenizer.decode(drawn)) == drawn
    assert max(drawn) < vocab_size <= max(drawn) + vocab_size // 500 + 1


def servers(**throughputs: float) -> dict[str, dict[str, float]]:
    return {
        name.replace("_", " "): {
            "output_tokens_per_s": rate,
            "ttft_p50_ms": 1000 / rate,
            "itl_p50_ms": 100 / rate,
            "itl_p99_ms": 500 / rate,
            "num_failed": 0,
        }
        for name, rate in throughputs.items()
    }


def found(medians: dict[str, Any], what: str) -> Outcome:
    [row] = [row for row in SERVED.rows if row.what == f"125M, float32, {what}"]
    return Outcome(row, row.measure({"shapes": {"125M": {"medians": medians}}}))


def test_the_best_shape_beats_peers_in_most_columns() -> None:
    rows = servers(baton_split=90, baton_colocated=80, vllm=100, llamacpp=50)
    rows["baton colocated"] |= {"itl_p50_ms": 0.1, "itl_p99_ms": 0.2}
    assert best_shape(rows) == "baton colocated"
    assert over_best_peer(rows, "baton split", "output_tokens_per_s") == 0.9
    medians = {"4": rows}
    assert found(medians, "4/s: ITL p99, best shape of Baton / best peer").verdict == "yes"
    lost = found(medians, "4/s: throughput, best shape of Baton / best peer")
    assert lost.verdict == "**missed**"
    assert lost.found is not None
    assert lost.found.text.startswith("0.80 (baton colocated: baton split 90")


def test_as_good_as_a_peer_is_not_better() -> None:
    medians = {"1": servers(baton_split=100, baton_colocated=90, vllm=100)}
    for column in ("throughput", "TTFT p50", "ITL p50", "ITL p99"):
        assert (
            found(medians, f"1/s: {column}, best shape of Baton / best peer").verdict
            == "**missed**"
        )


@pytest.mark.parametrize(("split", "verdict"), [(80.0, "yes"), (79.0, "**missed**")])
def test_split_is_judged_by_colocated(split: float, verdict: str) -> None:
    medians = {"4": servers(baton_split=split, baton_colocated=80)}
    assert found(medians, "4/s: throughput, split / colocated").verdict == verdict


def test_itl_of_split_is_a_quarter_at_most() -> None:
    medians = {"1": servers(baton_split=100, baton_colocated=25)}
    assert found(medians, "1/s: ITL p99, split / colocated").verdict == "yes"
    medians["1"]["baton split"]["itl_p99_ms"] += 0.01
    assert found(medians, "1/s: ITL p99, split / colocated").verdict == "**missed**"
