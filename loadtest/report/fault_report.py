"""FaultReport: what a fault cost its clients, from the records of the run.

A request counts at its scheduled time, even if its answer came much later. Shares and rates are
computed in windows that slide over the run, and are as long as ten requests take to arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.drills.audit import BlockAudit
from loadtest.drills.faults import FaultEvent
from loadtest.load.record import Outcome, RequestRecord
from loadtest.plan import LoadPlan
from loadtest.report.summary import client_seconds

MIN_WINDOW_S = 1.0
REQUESTS_PER_WINDOW = 10
BASELINE_S = 10.0
# A window counts as recovered if its share of good requests is at most this much below the share
# before the fault.
SLACK = 0.1
_STEPS_PER_WINDOW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """The cost of one fault for the clients; times of events are seconds since the run began.

    Attributes:
        window_s: length of the sliding windows in seconds.
        baseline_share: share of good requests among those scheduled in the ten seconds before the
            fault; good means within the SLO or, without an SLO, successful. None: no requests.
        lowest_share: share of good requests in the worst window until the next fault or the end.
        recovery_s: seconds from the fault to the end of the last window below the baseline; 0: no
            window was below; None: windows were still below at the next fault or the end.
        errors: number of failed requests by kind of error, among those that were open at the fault
            or were scheduled after it.
        num_retried: number of requests that succeeded at a second or later attempt of the router,
            by their receipts.
        num_orphans, num_leaked: numbers of KV blocks; see `FaultEvent`.
    """

    text: str
    began_s: float
    ended_s: float
    window_s: float
    baseline_share: float | None
    baseline_goodput_per_s: float | None
    lowest_share: float | None
    lowest_goodput_per_s: float | None
    recovery_s: float | None
    num_lost: int
    errors: dict[str, int]
    num_retried: int
    num_orphans: int | None
    num_leaked: int | None


def report_faults(
    plan: LoadPlan, records: Sequence[RequestRecord], events: Sequence[FaultEvent], end_s: float
) -> list[FaultReport]:
    """Report each fault of a run, in which the last request was sent by ``end_s``."""
    in_order = sorted(events, key=lambda event: event.began_s)
    ends = [event.began_s for event in in_order[1:]] + [end_s] * bool(in_order)
    return [
        _report(plan, records, event, until_s)
        for event, until_s in zip(in_order, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Window:
    """The number of good requests, and of all counted requests, scheduled in one window."""

    begin_s: float
    end_s: float
    num_good: int
    num_judged: int

    @property
    def share(self) -> float | None:
        return self.num_good / self.num_judged if self.num_judged else None

    @property
    def good_per_s(self) -> float:
        return self.num_good / (self.end_s - self.begin_s)


def _look(
    plan: LoadPlan, records: Sequence[RequestRecord], begin_s: float, end_s: float
) -> _Window:
    judged = [
        record
        for record in records
        if begin_s <= record.scheduled_s < end_s and record.outcome is not Outcome.CANCELLED
    ]
    good = sum(
        record.outcome is Outcome.OK and plan.slo.is_kept(client_seconds(record))
        for record in judged
    )
    return _Window(begin_s, end_s, good, len(judged))


def _report(
    plan: LoadPlan, records: Sequence[RequestRecord], event: FaultEvent, until_s: float
) -> FaultReport:
    begin_s = event.began_s
    before = _look(plan, records, max(plan.warmup_s, begin_s - BASELINE_S), begin_s)
    length_s = max(before.end_s - before.begin_s, 1e-9)
    per_s = before.num_judged / length_s
    window_s = max(MIN_WINDOW_S, REQUESTS_PER_WINDOW / per_s if per_s else MIN_WINDOW_S)
    windows = _slide(plan, records, begin_s, until_s, window_s)
    lowest = min(windows, key=lambda one: one.share or 0.0, default=None)
    touched = [r for r in records if r.ended_s >= begin_s and r.scheduled_s < until_s]
    lost = [r for r in touched if r.outcome is Outcome.ERROR]
    return FaultReport(
        text=event.fault.text,
        began_s=begin_s,
        ended_s=event.ended_s,
        window_s=window_s,
        baseline_share=before.share,
        baseline_goodput_per_s=before.good_per_s if before.num_judged else None,
        lowest_share=None if lowest is None else lowest.share,
        lowest_goodput_per_s=None if lowest is None else lowest.good_per_s,
        recovery_s=_recovery_s(windows, before.share, begin_s),
        num_lost=len(lost),
        errors=dict(Counter(record.error_kind for record in lost).most_common()),
        num_retried=sum(
            r.outcome is Outcome.OK and r.receipt is not None and r.receipt.num_attempts > 1
            for r in touched
        ),
        num_orphans=event.num_orphans,
        num_leaked=event.num_leaked,
    )


def _slide(
    plan: LoadPlan,
    records: Sequence[RequestRecord],
    begin_s: float,
    until_s: float,
    window_s: float,
) -> list[_Window]:
    """Slide a window over the time after a fault; return the windows with counted requests."""
    step_s = window_s / _STEPS_PER_WINDOW
    windows = []
    for number in range(int(max(until_s - begin_s, 0.0) / step_s + 1e-9)):
        end_s = begin_s + (number + 1) * step_s
        window = _look(plan, records, end_s - window_s, end_s)
        if window.num_judged:
            windows.append(window)
    return windows


def _recovery_s(windows: Sequence[_Window], baseline: float | None, begin_s: float) -> float | None:
    if baseline is None or not windows:
        return None
    least = baseline - SLACK - 1e-9
    bad = [number for number, one in enumerate(windows) if (one.share or 0.0) < least]
    if not bad:
        return 0.0
    if bad[-1] == len(windows) - 1:
        return None
    return windows[bad[-1]].end_s - begin_s


def fault_line(fault: FaultReport) -> str:
    """Describe what a fault cost, in one or two lines of at most 100 columns."""
    dip = "nobody asked before it"
    if fault.baseline_share is not None and fault.lowest_share is not None:
        dip = f"good {fault.baseline_share:.0%} -> {fault.lowest_share:.0%}"
    recovery = "not recovered"
    if fault.recovery_s is not None:
        recovery = f"recovered after {fault.recovery_s:.1f} s" if fault.recovery_s else "no dip"
    kinds = ", ".join(f"{number} {kind}" for kind, number in fault.errors.items())
    lost = f"{fault.num_lost} lost" + (f" ({kinds})" if kinds else "")
    leaked = "" if fault.num_leaked is None else f", {fault.num_leaked} blocks leaked"
    return (
        f"{fault.text} (at {fault.began_s:.1f} s): {dip}, {recovery}; "
        f"{lost}, {fault.num_retried} retried{leaked}"
    )


def audit_line(audit: BlockAudit) -> str:
    """Describe the KV blocks that are still held after the run."""
    problems = "".join(f"; {problem}" for problem in audit.problems)
    held = f"{audit.num_held} still held, {audit.num_orphans} of nobody"
    return f"blocks after the run: {held}{problems}"
