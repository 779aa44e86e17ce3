"""RequestSpans: makes the spans of an ended request from its record in the request log.

    chat MODEL                                      the request, from its arrival to its last token
      router.accept                                 checks it and tokenizes it
      router.queue                                  waits for admission
      router.place                                  picks nodes, or waits for them
      router.attempt                                on these nodes; parent of their spans
      router.place, router.attempt ...              after a failure; linked to the failed one

Commands to nodes name the attempt's span, so that nodes' spans become its children. The times of
the spans before the first attempt add up to the receipt's ``router_queue_s``.
"""

from __future__ import annotations

import time

from baton.link.words import MOVED
from baton.telemetry.spans import (
    Attribute,
    Span,
    SpanKind,
    SpanSink,
    TraceContext,
    child_span,
    zero_of,
)
from router.calls.request_log import AttemptRecord, RequestRecord


class RequestSpans:
    """Makes the spans of one router's traced requests, and passes them to a sink.

    Args:
        model: the model's name for clients.
        sink: receives the spans.
    """

    def __init__(self, model: str, sink: SpanSink) -> None:
        self._model = model
        self._sink = sink

    def on_request_end(self, record: RequestRecord) -> None:
        """Make the spans of a traced request that has ended, and pass them on."""
        assert record.trace is not None
        assert record.ended_s is not None
        spans = [_request_span(record, record.trace, self._model)]
        spans.append(child_span("router.accept", record.trace, 0.0, record.accepted_s))
        admitted_s = record.ended_s if record.admitted_s is None else record.admitted_s
        spans.append(child_span("router.queue", record.trace, record.accepted_s, admitted_s))
        placed_from_s: float | None = record.admitted_s
        for index, attempt in enumerate(record.attempts):
            assert placed_from_s is not None
            spans.append(child_span("router.place", record.trace, placed_from_s, attempt.began_s))
            before = record.attempts[index - 1] if index else None
            spans.append(_attempt_span(record, record.trace, attempt, before))
            placed_from_s = attempt.failed_s
        # The request ended while it was placed, before a further attempt began.
        if placed_from_s is not None and record.error_code:
            spans.append(child_span("router.place", record.trace, placed_from_s, record.ended_s))
        self._sink(spans, zero_of(lambda: time.perf_counter() - record.started_at))


def _request_span(record: RequestRecord, trace: TraceContext, model: str) -> Span:
    call, receipt = record.call, record.receipt
    assert call is not None
    assert call.terms.trace is not None
    assert record.ended_s is not None
    operation = "chat" if call.is_chat else "text_completion"
    params = call.sampling_params
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "baton.attempts": len(record.attempts),
    }
    if call.images:
        attributes["baton.images"] = len(call.images)
        attributes["baton.image_tokens"] = sum(span.num_tokens for span in call.image_spans)
    if record.tenant:
        attributes["baton.tenant"] = record.tenant
    if record.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (record.finish_reason.value,)
    events: tuple[tuple[str, float], ...] = ()
    if receipt is not None:
        attributes["gen_ai.usage.output_tokens"] = receipt.num_output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = receipt.num_cached_tokens
        attributes["gen_ai.response.time_to_first_chunk"] = receipt.ttft_s
        events = (("first token", receipt.ttft_s),)
    elif record.first_token_s is not None:
        events = (("first token", record.first_token_s),)
    if record.error_code:
        attributes["error.type"] = record.error_code
    return Span(
        name=f"{operation} {model}",
        context=trace,
        parent_id=call.terms.trace.span_id,
        begin_s=0.0,
        end_s=record.ended_s,
        kind=SpanKind.SERVER,
        attributes=attributes,
        events=events,
        error=record.error,
    )


def _attempt_span(
    record: RequestRecord,
    trace: TraceContext,
    attempt: AttemptRecord,
    before: AttemptRecord | None,
) -> Span:
    assert attempt.trace is not None
    assert record.ended_s is not None
    links: tuple[tuple[TraceContext, str], ...] = ()
    if before is not None and before.trace is not None:
        links = ((before.trace, "moved from" if before.error_code in MOVED else "retry of"),)
    attributes: dict[str, Attribute] = {}
    if attempt.prefill_node:
        attributes["baton.prefill_node"] = attempt.prefill_node
    if attempt.decode_node:
        attributes["baton.decode_node"] = attempt.decode_node
    if attempt.error_code:
        attributes["error.type"] = attempt.error_code
    return Span(
        name="router.attempt",
        context=attempt.trace,
        parent_id=trace.span_id,
        begin_s=attempt.began_s,
        end_s=record.ended_s if attempt.failed_s is None else attempt.failed_s,
        kind=SpanKind.CLIENT,
        attributes=attributes,
        links=links,
        error=attempt.error,
    )
