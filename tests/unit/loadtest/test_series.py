"""Unit tests of the numbers behind plots: they equal the script's and the summary's."""

from __future__ import annotations

import math
import random

import pytest

from baton.api.outputs import DecodeReceipt, PrefillReceipt, PushReceipt, Receipt
from loadtest.load.generate import Lengths
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.distribution import PER_MILLE, distribution
from loadtest.report.series import MAX_BINS, Series, cdf, make_series, waterfall
from loadtest.report.summary import RECEIPT_SECONDS
from loadtest.run import RunResult
from loadtest.slo import Slo
from tests.fakes.outside.load_targets import TICK_S, Answer, ScriptedTarget, even, run_virtually


def play(script: ScriptedTarget, slo: str = "ttft=0.5") -> tuple[RunResult, Series]:
    plan = LoadPlan(
        load=OpenLoop(rate_per_s=20.0, arrivals="constant"),
        input_lengths=Lengths(4),
        output_lengths=Lengths(10),
        warmup_s=2.0,
        duration_s=10.0,
        slo=Slo.parse(slo),
        max_lag_s=2 * TICK_S,
    )
    result = run_virtually(plan, script)
    return result, make_series(plan, result.records, result.summary.window_s)


@pytest.mark.medium
def test_an_answer_that_stands_still_once_breaks_an_slo_on_gaps_alone() -> None:
    def script(number: int, length: int) -> Answer:
        frames = even(0.1, 0.01)(number, length).frames
        stalled = (*frames[:5], (0.3, 1), *frames[6:])
        return Answer(frames=stalled if number % 4 == 0 else frames)

    for slo, attainment in {"tpot=0.05": 1.0, "tpot=0.05,gap=0.2": 0.75, "gap=0.4": 1.0}.items():
        result, _ = play(ScriptedTarget(script), slo)
        assert result.summary.attainment == pytest.approx(attainment), slo


def test_a_cdf_has_the_percentiles_of_all_values() -> None:
    chance = random.Random(1)
    values = [chance.lognormvariate(0, 1) for _ in range(5000)]
    points = cdf((value, 1) for value in values)
    found = distribution(values)
    assert found is not None
    assert len(points) < 500
    assert points[-1] == (found.max, 1.0)
    assert points == sorted(points)
    for name, per_mille in PER_MILLE.items():
        first = next(value for value, share in points if share >= per_mille / 1000)
        in_order = sorted(values)
        slack = 0 if per_mille == 990 else 0.006
        last_rank = min(math.ceil((per_mille / 1000 + slack) * 5000 - 1e-6), 5000)
        assert getattr(found, name) <= first <= in_order[last_rank - 1], name
    assert cdf([(1.0, 3), (2.0, 1)]) == [(1.0, 0.75), (2.0, 1.0)]


@pytest.mark.medium
def test_the_timeline_is_what_happened_when() -> None:
    def script(number: int, length: int) -> Answer:
        slow = 80 <= number < 120  # the fifth and the sixth second
        answer = even(1.0 if slow else 0.1, 0.01)(number, length)
        return Answer(frames=answer.frames, error="UNAVAILABLE" if number == 190 else "")

    result, series = play(ScriptedTarget(script))
    assert series.bin_s == 0.5  # five requests each, or more
    bins = series.timeline
    assert len(bins) <= MAX_BINS
    middle = next(one for one in bins if one.begin_s == pytest.approx(5.0))
    assert middle.ttft_p50_s == pytest.approx(1.0, abs=2 * TICK_S)
    early = next(one for one in bins if one.begin_s == pytest.approx(2.0))
    assert (early.ttft_p50_s, early.ttft_p99_s) == pytest.approx((0.1, 0.1), abs=2 * TICK_S)
    assert early.frame_gap_p99_s == pytest.approx(0.01, abs=2 * TICK_S)
    assert early.output_tokens_per_s == pytest.approx(200)

    def total(key: str) -> float:
        return float(sum(getattr(one, key) for one in bins)) * series.bin_s

    assert total("output_tokens_per_s") == pytest.approx(2000)
    assert total("ok_per_s") == pytest.approx(199)
    assert total("failed_per_s") == pytest.approx(1)
    assert total("good_per_s") == pytest.approx(159)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert series.cdfs[name][-1][0] == result.summary.latencies[name].max


def receipt(*, alone: bool, scale: float) -> Receipt:
    push = PushReceipt(num_bytes=1, num_blocks=1, transport="", exposed_transfer_s=0.02 * scale)
    return Receipt(
        num_prompt_tokens=5, num_output_tokens=9, ttft_s=0.5 * scale, total_s=2.0 * scale,
        prefill_node="" if alone else "p0", decode_node="d0", router_queue_s=0.1 * scale,
        prefill=None if alone else PrefillReceipt(
            queue_s=0.05 * scale, prefill_s=0.3 * scale, num_chunks=1, num_computed_tokens=5,
            num_cached_tokens=0,
        ),
        decode=DecodeReceipt(
            parked_s=0.4 * scale, first_step_s=0.03 * scale, steps_until_first=1,
            num_prompt_tokens_computed=0, num_forwards=8, num_preemptions=0, push=push,
        ),
    )  # fmt: skip


def test_a_stage_is_the_same_in_each_table() -> None:
    """Also where only some requests have it: the mean request's part is the mean of those that do,
    times their share."""
    receipts = [receipt(alone=False, scale=scale) for scale in (1, 2)]
    receipts += [receipt(alone=True, scale=1)] * 6
    for stage in waterfall(receipts):
        values = [
            value for one in receipts if (value := RECEIPT_SECONDS[stage.latency](one)) is not None
        ]
        found = distribution(values)
        assert found is not None
        assert stage.seconds == pytest.approx(found.mean * found.count / len(receipts)), stage
    network = [RECEIPT_SECONDS["network_s"](one) for one in receipts]
    assert [value is None for value in network] == [False] * 2 + [True] * 6


def test_the_stages_of_the_mean_request_sum_to_its_time() -> None:
    receipts = [receipt(alone=False, scale=scale) for scale in (1, 1, 4)]
    receipts.append(receipt(alone=True, scale=2))
    stages = {stage.name: stage for stage in waterfall(receipts)}
    in_turn = [stage for stage in stages.values() if not stage.overlaps]
    end_s = 0.0
    for stage in in_turn:
        assert stage.begin_s == pytest.approx(end_s)
        end_s += stage.seconds
    assert end_s == pytest.approx(sum(one.total_s for one in receipts) / 4)
    ttft_s = sum(one.ttft_s for one in receipts) / 4
    assert stages["tokens after the first"].begin_s == pytest.approx(ttft_s)
    assert stages["prefill"].seconds == pytest.approx(0.3 * 6 / 4)
    assert stages["prompt on decode alone"].seconds == pytest.approx(0.8 / 4)
    assert stages["parked on decode"].begin_s == pytest.approx(0.1 * 8 / 4)
    assert waterfall([]) == []
