"""Series: a run's figures over time, its distributions, and the stages of its mean request.

A result's JSON contains the series, so that the page can draw plots from the JSON file alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.api.outputs import Receipt
from loadtest.load.record import Outcome, RequestRecord
from loadtest.plan import LoadPlan
from loadtest.report.distribution import distribution
from loadtest.report.summary import RECEIPT_SECONDS, client_seconds, frame_gaps
from loadtest.report.terms import LATENCY_NAMES, TTFT_PARTS

MAX_POINTS = 200  # maximum number of a curve's points up to 99 %, and also of its points above 99 %
MIN_BINS, MAX_BINS = 10, 60
MIN_PER_BIN = 5  # mean number of requests per bin; with fewer, rates would only flicker
AFTER_FIRST = "after_first_s"
_WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBin:
    """One bin of the timeline, which begins at ``begin_s``; rates are per second.

    Attributes:
        good_per_s: rate of requests that succeeded and kept the SLO; None without an SLO.
        ttft_p50_s: median TTFT of the requests that were scheduled in the bin.
        frame_gap_p99_s: 99th percentile of the gaps before the frames that arrived in the bin.
    """

    begin_s: float
    ok_per_s: float
    good_per_s: float | None
    failed_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    frame_gap_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the mean request's time; in the mean, requests without this part count as 0 s.

    Attributes:
        latency: name of the stage's latency in the summary, whose mean leaves out requests without
            this stage.
        begin_s: seconds from the mean request's arrival to the beginning of the stage.
        seconds: length of the stage in the mean request; the lengths of consecutive stages add up
            to the time of all.
        overlaps: whether the stage runs at the same time as other stages, and not between two
            stages.
    """

    name: str
    latency: str
    begin_s: float
    seconds: float
    overlaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A run's figures over time, its distributions, and the stages of its mean request.

    Attributes:
        cdfs: by latency, the points of its distribution: seconds, and the share of values that are
            not greater.
        bin_s: width of the timeline's bins in seconds; the first bin begins when the run begins,
            with the warm-up.
        waterfall: the stages of the mean request in order, over the measured requests with a
            receipt.
    """

    cdfs: dict[str, list[Point]]
    bin_s: float
    timeline: list[TimelineBin]
    waterfall: list[Stage]


def make_series(
    plan: LoadPlan, records: Sequence[RequestRecord], window_s: tuple[float, float]
) -> Series:
    """Make the series of a run from the records of its requests, which have all ended."""
    begin_s, end_s = window_s
    measured = [r for r in records if begin_s <= r.scheduled_s <= end_s]
    receipts = [r.receipt for r in measured if r.receipt is not None]
    last_s = max((max(r.ended_s, r.scheduled_s) for r in records), default=0.0)
    least_s = min(MIN_PER_BIN * last_s / max(len(records), 1), last_s / MIN_BINS)
    least_s = max(least_s, last_s / MAX_BINS)
    bin_s = next((w for w in _WIDTHS_S if w >= least_s), last_s / MAX_BINS)
    return Series(
        cdfs=_cdfs(measured),
        bin_s=bin_s,
        timeline=timeline(plan, records, bin_s, last_s),
        waterfall=waterfall(receipts),
    )


def _cdfs(records: Sequence[RequestRecord]) -> dict[str, list[Point]]:
    each = [client_seconds(record) for record in records]
    pairs = {
        f"{name}_s": [(seconds, 1) for one in each if (seconds := one[name]) is not None]
        for name in ("ttft", "tpot", "e2e")
    }
    gaps = [gap for record in records for gap in frame_gaps(record)]
    pairs["itl_s"] = [(gap_s / tokens, tokens) for gap_s, tokens in gaps]
    return {name: cdf(values) for name, values in pairs.items() if values}


def cdf(pairs: Iterable[tuple[float, int]]) -> list[Point]:
    """Return points of the cumulative distribution of weighted values.

    A point is a value and the share of the weight at or below this value. Values between points
    are left out, not interpolated.
    """
    in_order = sorted(pairs)
    total = sum(weight for _, weight in in_order)
    points: list[Point] = []
    seen, next_share = 0, 0.0
    for index, (value, weight) in enumerate(in_order):
        seen += weight
        share = seen / total
        if share >= next_share or index == len(in_order) - 1:
            points.append((value, share))
            # Do not skip past 99 %, because each point of the tail matters.
            wide = min(share + 1 / MAX_POINTS, 0.99)
            next_share = wide if share < 0.99 else share + 0.01 / MAX_POINTS
    return points


def timeline(
    plan: LoadPlan, records: Sequence[RequestRecord], bin_s: float, last_s: float
) -> list[TimelineBin]:
    """Divide a run into bins, from its beginning to its last event, and compute each bin."""
    num_bins = max(1, math.ceil(last_s / bin_s)) if records else 0
    ended: list[list[RequestRecord]] = [[] for _ in range(num_bins)]
    ttfts: list[list[float]] = [[] for _ in range(num_bins)]
    gaps: list[list[float]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins

    def at(time_s: float) -> int:
        return min(int(time_s / bin_s), num_bins - 1)

    for record in records:
        ended[at(record.ended_s)].append(record)
        before_s: float | None = None
        for time_s, num in zip(record.frame_times_s, record.frame_tokens, strict=True):
            tokens[at(time_s)] += num
            if before_s is None:
                ttfts[at(record.scheduled_s)].append(time_s - record.scheduled_s)
            else:
                gaps[at(time_s)].append(time_s - before_s)
            before_s = time_s
    has_slo = bool(plan.slo.limits)
    found = []
    for index in range(num_bins):
        ok = [r for r in ended[index] if r.outcome is Outcome.OK]
        good = sum(plan.slo.is_kept(client_seconds(r)) for r in ok)
        failed = sum(r.outcome is Outcome.ERROR for r in ended[index])
        ttft, gap = distribution(ttfts[index]), distribution(gaps[index])
        found.append(
            TimelineBin(
                begin_s=index * bin_s,
                ok_per_s=len(ok) / bin_s,
                good_per_s=good / bin_s if has_slo else None,
                failed_per_s=failed / bin_s,
                output_tokens_per_s=tokens[index] / bin_s,
                ttft_p50_s=None if ttft is None else ttft.p50,
                ttft_p99_s=None if ttft is None else ttft.p99,
                frame_gap_p99_s=None if gap is None else gap.p99,
            )
        )
    return found


_IN_TURN = (*TTFT_PARTS, AFTER_FIRST)
# Stages that overlap other stages, each with the stage after which it begins.
_BESIDE = {
    "parked_s": "place_s",
    "exposed_transfer_s": "prefill_s",
    "handoff_s": "prefill_s",
    "first_step_s": "parked_s",
}


def waterfall(receipts: Sequence[Receipt]) -> list[Stage]:
    """Compute the stages of the mean request from the receipts of all requests."""
    if not receipts:
        return []
    stages: dict[str, Stage] = {}
    begin_s = 0.0
    for latency in _IN_TURN:
        stages[latency] = _stage(latency, begin_s, receipts)
        begin_s += stages[latency].seconds
    for latency, after in _BESIDE.items():
        begin_s = stages[after].begin_s + stages[after].seconds
        stages[latency] = _stage(latency, begin_s, receipts, overlaps=True)
    return [stage for stage in stages.values() if stage.seconds > 0]


def _stage(
    latency: str, begin_s: float, receipts: Sequence[Receipt], overlaps: bool = False
) -> Stage:
    seconds_of = RECEIPT_SECONDS[latency]
    return Stage(
        name=LATENCY_NAMES[latency],
        latency=latency,
        begin_s=begin_s,
        seconds=sum(seconds_of(receipt) or 0.0 for receipt in receipts) / len(receipts),
        overlaps=overlaps,
    )
