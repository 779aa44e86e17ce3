"""Request stats: counts and latencies of the requests that finished lately, from `RequestLog`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.calls.request_log import RequestLog, RequestRecord

DEFAULT_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles by the nearest-rank method; all are zero if there are no values."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        if not values:
            return cls()
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[math.ceil(share * len(ordered)) - 1]

        return cls(at(0.5), at(0.9), at(0.99), ordered[-1])


@dataclass(slots=True)
class NodeFigures:
    """One node's counts and latencies in a window, for the prompts and outputs that it computed."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_failed_attempts: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    times_per_token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStats:
    """Counts and latencies of the requests that finished in a window and are still in the log.

    Attributes:
        nodes: each node's counts and latencies, by node name.
    """

    window_s: float
    num_finished: int
    ttft_s: Percentiles
    time_per_token_s: Percentiles
    total_s: Percentiles
    nodes: dict[str, NodeFigures]


def window_stats(logs: Sequence[RequestLog], window_s: float) -> WindowStats:
    """Return counts and latencies of requests that ended in the last ``window_s``, in all logs."""
    oldest = logs[0].clock() - window_s
    ended = [
        record
        for log in logs
        for record in log.latest()
        if record.ended_s is not None and record.started_at + record.ended_s >= oldest
    ]
    finished = [record for record in ended if record.finish_reason is not None]
    receipts = [record.receipt for record in finished if record.receipt is not None]
    nodes: defaultdict[str, NodeFigures] = defaultdict(NodeFigures)
    for record in ended:
        _count_failures(record, nodes)
    for record in finished:
        _count(record, nodes)
    return WindowStats(
        window_s=window_s,
        num_finished=len(finished),
        ttft_s=Percentiles.of([receipt.ttft_s for receipt in receipts]),
        time_per_token_s=Percentiles.of(
            [receipt.time_per_token_s for receipt in receipts if receipt.num_output_tokens > 1]
        ),
        total_s=Percentiles.of([receipt.total_s for receipt in receipts]),
        nodes=dict(nodes),
    )


def _count(record: RequestRecord, nodes: defaultdict[str, NodeFigures]) -> None:
    receipt = record.receipt
    assert receipt is not None
    for name in filter(None, (receipt.prefill_node, receipt.decode_node)):
        nodes[name].num_requests += 1
    computed_by = receipt.prefill_node or receipt.decode_node
    if computed_by:
        node = nodes[computed_by]
        node.num_prompt_tokens += receipt.num_prompt_tokens
        node.ttfts_s.append(receipt.ttft_s)
    if receipt.decode_node:
        node = nodes[receipt.decode_node]
        node.num_output_tokens += receipt.num_output_tokens
        if receipt.num_output_tokens > 1:
            node.times_per_token_s.append(receipt.time_per_token_s)


def _count_failures(record: RequestRecord, nodes: defaultdict[str, NodeFigures]) -> None:
    """Count a failed attempt for both of its nodes: the log does not say which node failed."""
    for attempt in record.attempts:
        if attempt.failed_s is not None:
            for name in filter(None, (attempt.prefill_node, attempt.decode_node)):
                nodes[name].num_failed_attempts += 1
