"""Unit tests of generated traces: their statistics, and equal traces from equal seeds."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from loadtest.load.generate import (
    WORKLOADS,
    Lengths,
    Workload,
    gamma_arrivals,
    generate,
    on_off_arrivals,
)
from loadtest.load.traces import TraceRequest, num_blocks, prompt_token_ids, read_trace, write_trace


def starts(rate_per_s: float = 10.0, seed: int = 0) -> Iterator[float]:
    return gamma_arrivals(random.Random(seed), rate_per_s=rate_per_s, variation=1.0)


def make(name: str, num_sessions: int = 1000, seed: int = 0) -> list[TraceRequest]:
    return generate(WORKLOADS[name], starts(), num_sessions=num_sessions, seed=seed)


def shared_share(requests: list[TraceRequest]) -> float:
    """Blocks that an endless cache would have found, of all blocks."""
    seen: set[int] = set()
    num_found = 0
    for request in requests:
        num_found += sum(hash_id in seen for hash_id in request.hash_ids)
        seen.update(request.hash_ids)
    return num_found / sum(len(request.hash_ids) for request in requests)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_is_well_formed_and_a_function_of_its_seed(name: str, tmp_path: Path) -> None:
    requests = make(name, 200)
    assert requests == make(name, 200)
    assert requests != make(name, 200, seed=1)
    assert all(len(r.hash_ids) == num_blocks(r.input_length) for r in requests)
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    # An id stands for all before it: it never comes behind two different ones.
    parents: dict[int, int | None] = {}
    for request in requests:
        for parent, hash_id in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert parents.setdefault(hash_id, parent) == parent
    write_trace(tmp_path / "t", requests)
    assert list(read_trace(tmp_path / "t")) == requests


@pytest.mark.parametrize(
    ("name", "input_length", "output_length"),
    [("conversation", 12_035, 343), ("tool-agent", 8_596, 182)],
)
def test_mean_lengths_are_those_of_the_public_traces(
    name: str, input_length: int, output_length: int
) -> None:
    requests = make(name, 5000)
    assert statistics.fmean(r.input_length for r in requests) == pytest.approx(
        input_length, rel=0.1
    )
    assert statistics.fmean(r.output_length for r in requests) == pytest.approx(
        output_length, rel=0.05
    )


def test_popular_prefixes_follow_zipf() -> None:
    workload = Workload(
        num_groups=10,
        zipf_exponent=1.0,
        prefix_tokens=Lengths(1024),
        turn_tokens=Lengths(100),
        output_tokens=Lengths(10),
    )
    requests = generate(workload, starts(), num_sessions=5000, seed=3)
    counts = [count for _, count in Counter(r.hash_ids[0] for r in requests).most_common()]
    total = sum(1 / rank for rank in range(1, 11))
    assert [count / 5000 for count in counts] == pytest.approx(
        [1 / rank / total for rank in range(1, 11)], abs=0.02
    )
    assert {r.input_length for r in requests} == {1124}
    assert shared_share(requests) == pytest.approx(2 / 3, abs=0.01)


def test_a_conversation_goes_on_where_it_was() -> None:
    workload = Workload(
        turn_tokens=Lengths(700), output_tokens=Lengths(100), mean_turns=4.0, mean_pause_s=1.0
    )
    requests = generate(workload, iter([0.0]), num_sessions=1, seed=5)
    assert len(requests) > 1
    for before, after in itertools.pairwise(requests):
        assert after.input_length == before.input_length + 100 + 700
        num_full = before.input_length // 512
        assert after.hash_ids[:num_full] == before.hash_ids[:num_full]
        prompts = [prompt_token_ids(r.hash_ids, r.input_length, 1000) for r in (before, after)]
        assert prompts[0][: num_full * 512] == prompts[1][: num_full * 512]


def test_sessions_have_so_many_turns_and_end_before_their_prompts_are_too_long() -> None:
    workload = Workload(
        turn_tokens=Lengths(10), output_tokens=Lengths(10), mean_turns=4.0, max_input_length=500
    )
    requests = generate(workload, starts(), num_sessions=4000, seed=1)
    assert len(requests) / 4000 == pytest.approx(4.0, rel=0.05)
    assert max(r.input_length for r in requests) <= 500


def test_conversations_and_agents_share_much_and_strangers_nothing() -> None:
    assert 0.3 < shared_share(make("conversation")) < 0.8
    assert shared_share(make("tool-agent")) > 0.6
    strangers = Workload(turn_tokens=Lengths(2000, 1.0), output_tokens=Lengths(10))
    assert shared_share(generate(strangers, starts(), num_sessions=100, seed=0)) == 0.0


@pytest.mark.parametrize("variation", [0.2, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(variation: float) -> None:
    times = gamma_arrivals(random.Random(1), rate_per_s=5.0, variation=variation)
    gaps = [b - a for a, b in itertools.pairwise(itertools.islice(times, 40_000))]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / 0.2 == pytest.approx(variation, rel=0.05)


def test_on_off_arrivals_come_in_clusters_at_the_mean_rate() -> None:
    times = list(
        itertools.islice(
            on_off_arrivals(random.Random(2), rate_per_s=50.0, mean_on_s=2.0, mean_off_s=6.0),
            40_000,
        )
    )
    assert len(times) / times[-1] == pytest.approx(50.0 * 2 / 8, rel=0.15)
    per_second = Counter(int(time_s) for time_s in times)
    counts = [per_second[second] for second in range(int(times[-1]))]
    assert statistics.variance(counts) / statistics.fmean(counts) > 10  # 1 for Poisson
    assert times == sorted(times)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="mean_turns"):
        Workload(turn_tokens=Lengths(1), output_tokens=Lengths(1), mean_turns=0.5)
    with pytest.raises(ConfigError, match="variation"):
        next(gamma_arrivals(random.Random(0), rate_per_s=1.0, variation=0.0))
    with pytest.raises(ConfigError, match="mean_off_s"):
        next(on_off_arrivals(random.Random(0), rate_per_s=1.0, mean_on_s=1.0, mean_off_s=0.0))
