"""AccessLog: one log line for each request of a client, written when the request ends.

A line contains no secrets, and nothing from the client's input but the request id. Callers are
named by the names of their keys. Unauthenticated calls are only in the audit log.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from baton.access.identity import Principal
from baton.telemetry.spans import TraceContext, parse_traceparent
from baton.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_MAX_CALL_CHARS = 100


@dataclass(slots=True, kw_only=True)
class AccessEntry:
    """The log entry of one request, filled in by the code that serves the request.

    Attributes:
        call: method or path, such as ``POST /v1/completions``.
        address: the caller's address.
        request_id: the request's id; empty until known.
        trace_id: id of the request's trace, from the caller or from Baton; empty: there is no
            trace.
        trace: this request's trace context; None: the request is not traced.
        model: served name that the request uses; empty: the default name.
        num_prompt_tokens: number of tokens in the request's prompts; a prompt with several outputs
            counts once.
        num_output_tokens: number of tokens sent to the client, over all outputs.
        ttft_s: time to the first output token; None: no output token was sent.
        error: final status of the request, if it differs from the status of the call.
    """

    call: str = ""
    address: str = ""
    request_id: str = ""
    trace_id: str = ""
    trace: TraceContext | None = None
    model: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    error: str = ""
    began_at: float = field(default_factory=time.perf_counter)

    def join_trace(self, tracing: Tracing, traceparent: str, tracestate: str) -> None:
        """Join the trace that the caller's headers name, or begin a trace."""
        self.trace = tracing.begin(traceparent, tracestate)
        known = self.trace or parse_traceparent(traceparent)
        self.trace_id = "" if known is None else known.trace_id.hex()

    def note_tokens(self, number: int) -> None:
        """Count tokens that are sent to the client; the first tokens set ``ttft_s``."""
        if number and self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self.began_at
        self.num_output_tokens += number


class AccessLog:
    """The access log of a router.

    Args:
        model: default name of the model.
        is_on: whether to write lines.
    """

    def __init__(self, model: str = "", *, is_on: bool = False) -> None:
        self._model = model
        self._is_on = is_on

    def write(self, entry: AccessEntry, principal: Principal | None, status: str) -> None:
        """Log a request that has ended.

        Args:
            principal: the caller; None: the caller is not authenticated, so nothing is logged.
            status: HTTP or gRPC status.
        """
        if not self._is_on or principal is None:
            return
        logger.info(
            "%s %s",
            entry.call[:_MAX_CALL_CHARS],
            status,
            extra={
                "request_id": entry.request_id or None,
                "trace_id": entry.trace_id or None,
                "key": principal.name or None,
                "tenant": principal.tenant if principal.tenant != principal.name else None,
                "address": entry.address,
                "model": entry.model or self._model,
                "prompt_tokens": entry.num_prompt_tokens,
                "output_tokens": entry.num_output_tokens,
                "status": status,
                "error": entry.error or None,
                "ttft_s": None if entry.ttft_s is None else round(entry.ttft_s, 6),
                "duration_s": round(time.perf_counter() - entry.began_at, 6),
            },
        )
