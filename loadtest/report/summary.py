"""Summary: the server's figures, computed from a run's records, and whether they are valid.

Latencies and rates are of measured requests: those that were scheduled within the window, which
begins after the warm-up. TTFT and E2E are measured from the scheduled time. TPOT is the time from a
request's first frame to its last, divided by the number of tokens after the first frame. ITL counts
every token: a frame of k tokens after a gap of g seconds counts as k gaps of g / k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.api.outputs import PushReceipt, Receipt
from loadtest.load.cached import CacheReport, report_cache
from loadtest.load.clock import LoopLag
from loadtest.load.record import Outcome, RequestRecord
from loadtest.plan import LoadPlan
from loadtest.report.distribution import Distribution, distribution, weighted_distribution
from loadtest.report.image_report import ImageReport, report_images
from loadtest.report.terms import TTFT_PARTS


def _part(name: str) -> Callable[[Receipt], float | None]:
    return lambda receipt: receipt.ttft_parts.get(name)


# By latency, the function that returns its seconds from a receipt; None: the request had no such
# part.
RECEIPT_SECONDS: dict[str, Callable[[Receipt], float | None]] = {
    "server_ttft_s": lambda r: r.ttft_s,
    "server_tpot_s": lambda r: r.time_per_token_s if r.num_output_tokens > 1 else None,
    "server_total_s": lambda r: r.total_s,
    "router_queue_s": lambda r: r.router_queue_s,
    **{name: _part(name) for name in TTFT_PARTS},
    "after_first_s": lambda r: r.total_s - r.ttft_s,
    "exposed_transfer_s": lambda r: p.exposed_transfer_s if (p := _push_of(r)) else None,
    "posting_s": lambda r: p.posting_s if (p := _push_of(r)) else None,
    "handoff_s": lambda r: r.handoff_s if _push_of(r) else None,
    "parked_s": lambda r: r.decode.parked_s if r.decode else None,
    "first_step_s": lambda r: r.decode.first_step_s if r.decode else None,
    "encodings_wait_s": lambda r: p.encodings_wait_s or None if (p := r.prefill) else None,
    "pixels_wait_s": lambda r: p.pixels_wait_s or None if (p := r.prefill) else None,
    "encoder_s": lambda r: p.encoder_s or None if (p := r.prefill) else None,
}


def _push_of(receipt: Receipt) -> PushReceipt | None:
    """Return the push in a receipt, or None if nothing was pushed."""
    push = receipt.decode.push if receipt.decode is not None else None
    return push if push is not None and push.num_blocks > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """The load generator's own lag in seconds, which is an error of all latencies.

    Attributes:
        send: time of sending minus scheduled time, of the measured requests.
        loop: lag of the event loop, measured every 10 ms within the window.
        limit_s: limit that the p99 of ``send`` and the p99 of ``loop`` must keep.
    """

    send: Distribution | None
    loop: Distribution | None
    limit_s: float

    @property
    def kept_up(self) -> bool:
        return all(lag is None or lag.p99 <= self.limit_s for lag in (self.send, self.loop))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """A comparison of the token counts made here with the server's.

    Attributes:
        num_checked: number of requests whose tokens were counted both here and by the server.
        num_miscounted: number of checked requests whose two counts differ.
        num_estimated: number of requests whose frames did not tell their numbers of tokens.
        num_short: number of requests that got fewer tokens than the client asked for.
    """

    num_checked: int
    num_miscounted: int
    num_estimated: int
    num_short: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptReport:
    """Figures other than times from Baton's receipts, over all requests with a receipt."""

    num_receipts: int
    num_retried: int
    num_preemptions: int
    num_transferred_bytes: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of one run.

    Attributes:
        window_s: begin and end of the measured window, in seconds of the run.
        num_requests: number of measured requests: the sum of ``num_ok``, ``num_cancelled`` and all
            ``errors``.
        asked_per_s: number of measured requests divided by the window's length.
        rate_span_s: seconds by which the numbers of ended requests are divided: the window's length
            or, if longer, the time from the first to the last successful end of a measured request.
            So the time in which an overloaded server works off its backlog counts, too.
        requests_per_s: number of measured requests that succeeded, divided by ``rate_span_s``;
            never above ``asked_per_s``.
        output_tokens_per_s: number of output tokens, of all requests, that arrived in the window,
            divided by the window's length.
        prompt_tokens_per_s: number of tokens of the prompts whose first output token arrived in the
            window, divided by the window's length.
        latencies: distributions of the measured requests' latencies in seconds, by name.
        attainment: share of the measured requests that succeeded and kept the SLO; requests that
            the client cancelled are not counted. None without an SLO or without requests.
        goodput_per_s: number of measured requests that succeeded and kept the SLO, divided by
            ``rate_span_s``; never above ``requests_per_s``. None without an SLO.
    """

    window_s: tuple[float, float]
    num_requests: int
    num_ok: int
    num_cancelled: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    asked_per_s: float
    rate_span_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    latencies: dict[str, Distribution]
    attainment: float | None
    goodput_per_s: float | None
    tokens: TokenReport
    cache: CacheReport
    receipts: ReceiptReport | None
    images: ImageReport | None
    lag: LagReport


def client_seconds(record: RequestRecord) -> dict[str, float | None]:
    """Return TTFT, TPOT, longest gap between frames and E2E of one request.

    A latency is None if the request ended before it could be measured.
    """
    times, tokens = record.frame_times_s, record.frame_tokens
    num_after = record.num_tokens - tokens[0] if tokens else 0
    return {
        "ttft": times[0] - record.scheduled_s if times else None,
        "tpot": (times[-1] - times[0]) / num_after if num_after > 0 else None,
        "gap": max((gap_s for gap_s, _ in frame_gaps(record)), default=None),
        "e2e": record.ended_s - record.scheduled_s if record.outcome is Outcome.OK else None,
    }


def frame_gaps(record: RequestRecord) -> list[tuple[float, int]]:
    """Return the gap in seconds before each frame but the first, and the frame's tokens.

    A frame without counted tokens is joined with the next frame.
    """
    gaps = []
    before_s: float | None = None
    for time_s, num_tokens in zip(record.frame_times_s, record.frame_tokens, strict=True):
        if num_tokens == 0:
            continue
        if before_s is not None:
            gaps.append((time_s - before_s, num_tokens))
        before_s = time_s
    return gaps


def summarize(plan: LoadPlan, records: Sequence[RequestRecord], loop_lag: LoopLag) -> Summary:
    """Compute a run's summary from the records of its requests, which have all ended."""
    begin_s, end_s = _window(plan, records)
    measured = [r for r in records if begin_s <= r.scheduled_s <= end_s]
    counts = Counter(record.outcome for record in measured)
    failed = [record for record in measured if record.outcome is Outcome.ERROR]
    length_s = max(end_s - begin_s, 1e-9)
    ended_well = [r for r in measured if r.outcome is Outcome.OK]
    span_s = _rate_span_s(ended_well, length_s)
    good = [r for r in ended_well if plan.slo.is_kept(client_seconds(r))]
    num_judged = len(measured) - counts[Outcome.CANCELLED]
    has_slo = bool(plan.slo.limits)
    return Summary(
        window_s=(begin_s, end_s),
        num_requests=len(measured),
        num_ok=counts[Outcome.OK],
        num_cancelled=counts[Outcome.CANCELLED],
        errors=dict(Counter(record.error_kind for record in failed).most_common()),
        error_examples={record.error_kind: record.error for record in reversed(failed)},
        asked_per_s=len(measured) / length_s,
        rate_span_s=span_s,
        requests_per_s=len(ended_well) / span_s,
        output_tokens_per_s=sum(_tokens_within(r, begin_s, end_s) for r in records) / length_s,
        prompt_tokens_per_s=sum(
            r.num_prompt_tokens or 0
            for r in records
            if r.frame_times_s and begin_s <= r.frame_times_s[0] <= end_s
        )
        / length_s,
        latencies=_latencies(measured),
        attainment=len(good) / num_judged if has_slo and num_judged else None,
        goodput_per_s=len(good) / span_s if has_slo else None,
        tokens=_token_report(measured),
        cache=report_cache(measured),
        receipts=_receipt_report([r.receipt for r in measured if r.receipt is not None]),
        images=report_images(measured),
        lag=LagReport(
            send=distribution(record.sent_s - record.scheduled_s for record in measured),
            loop=distribution(
                lag_s
                for time_s, lag_s in zip(loop_lag.times_s, loop_lag.lags_s, strict=True)
                if begin_s <= time_s <= end_s
            ),
            limit_s=plan.max_lag_s,
        ),
    )


def _window(plan: LoadPlan, records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Return when the measured window begins and ends.

    The window ends at the last answer, but no later than the plan's duration.
    """
    last_s = max((max(r.scheduled_s, r.ended_s) for r in records), default=plan.warmup_s)
    end_s = last_s if plan.duration_s is None else min(last_s, plan.duration_s)
    return plan.warmup_s, max(end_s, plan.warmup_s)


def _rate_span_s(ended_well: Sequence[RequestRecord], length_s: float) -> float:
    """Return the seconds by which numbers of ended requests are divided (`Summary.rate_span_s`)."""
    ends_s = [record.ended_s for record in ended_well]
    return max(length_s, max(ends_s, default=0.0) - min(ends_s, default=0.0))


def _tokens_within(record: RequestRecord, begin_s: float, end_s: float) -> int:
    return sum(
        num_tokens
        for time_s, num_tokens in zip(record.frame_times_s, record.frame_tokens, strict=True)
        if begin_s <= time_s <= end_s
    )


def _latencies(records: Sequence[RequestRecord]) -> dict[str, Distribution]:
    each = [client_seconds(record) for record in records]
    gaps = [gap for record in records for gap in frame_gaps(record)]
    found = {
        "ttft_s": distribution(s["ttft"] for s in each if s["ttft"] is not None),
        "tpot_s": distribution(s["tpot"] for s in each if s["tpot"] is not None),
        "itl_s": weighted_distribution([(gap_s / tokens, tokens) for gap_s, tokens in gaps]),
        "frame_gap_s": distribution(gap_s for gap_s, _ in gaps),
        "e2e_s": distribution(s["e2e"] for s in each if s["e2e"] is not None),
        **_latencies_beside_images(records),
    }
    receipts = [record.receipt for record in records if record.receipt is not None]
    for name, seconds_of in RECEIPT_SECONDS.items():
        values = map(seconds_of, receipts)
        found[name] = distribution(value for value in values if value is not None)
    return {name: values for name, values in found.items() if values is not None}


def _latencies_beside_images(
    records: Sequence[RequestRecord],
) -> dict[str, Distribution | None]:
    """Compute TTFT and ITL of requests with images and of the others; empty without images."""
    kinds = {
        "images": [record for record in records if record.planned.images],
        "text": [record for record in records if not record.planned.images],
    }
    if not kinds["images"]:
        return {}
    found = dict[str, Distribution | None]()
    for kind, those in kinds.items():
        ttfts = [client_seconds(record)["ttft"] for record in those]
        found[f"ttft_{kind}_s"] = distribution(ttft for ttft in ttfts if ttft is not None)
    for kind, those in kinds.items():
        gaps = [gap for record in those for gap in frame_gaps(record)]
        found[f"itl_{kind}_s"] = weighted_distribution([(s / number, number) for s, number in gaps])
    return found


def _token_report(records: Sequence[RequestRecord]) -> TokenReport:
    return TokenReport(
        num_checked=sum(record.is_checked for record in records),
        num_miscounted=sum(record.is_miscounted for record in records),
        num_estimated=sum(not record.counted for record in records),
        num_short=sum(
            r.outcome is Outcome.OK and r.num_tokens < r.planned.output_length for r in records
        ),
    )


def _receipt_report(receipts: Sequence[Receipt]) -> ReceiptReport | None:
    if not receipts:
        return None
    decodes = [receipt.decode for receipt in receipts if receipt.decode is not None]
    return ReceiptReport(
        num_receipts=len(receipts),
        num_retried=sum(receipt.num_attempts > 1 for receipt in receipts),
        num_preemptions=sum(decode.num_preemptions for decode in decodes),
        num_transferred_bytes=sum(decode.push.num_bytes for decode in decodes),
        num_drafts=sum(decode.num_drafts for decode in decodes),
        num_accepted_drafts=sum(decode.num_accepted_drafts for decode in decodes),
    )
