"""AccessLog: one line in the log for each request of a client, when it has ended.

Holds no secret and nothing that clients wrote but the request's id: whose request it was is told by
the name of its key. Who is unknown is in the audit log only.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from baton.access.identity import Principal
from baton.telemetry.trace_context import TraceContext, parse_traceparent
from baton.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_MAX_CALL_CHARS = 100


@dataclass(slots=True, kw_only=True)
class AccessEntry:
    """The log entry of one request. One writer: whoever serves it.

    Attributes:
        call: what was called, such as ``POST /v1/completions``.
        address: of the machine that calls.
        request_id: empty: it has none (yet).
        trace_id: of the trace that it is part of; empty: of none.
        trace: what its spans are part of; None: it is not traced.
        num_prompt_tokens: of its prompts; each once, however many outputs it has.
        num_output_tokens: that were on their way to the client, of all outputs.
        ttft_s: until the first of them; None: there was none.
        error: name of the status that it ended with, where that is not the call's own.
    """

    call: str = ""
    address: str = ""
    request_id: str = ""
    trace_id: str = ""
    trace: TraceContext | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    error: str = ""
    began_at: float = field(default_factory=time.perf_counter)

    def join_trace(self, tracing: Tracing, traceparent: str, tracestate: str) -> None:
        """Note the trace that it is part of, by its caller's headers or as one of its own."""
        self.trace = tracing.begin(traceparent, tracestate)
        known = self.trace or parse_traceparent(traceparent)
        self.trace_id = "" if known is None else known.trace_id.hex()

    def note_tokens(self, number: int) -> None:
        """Count tokens sent to the client; the first ones end the TTFT."""
        if number and self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self.began_at
        self.num_output_tokens += number


class AccessLog:
    """The access log of a router.

    Args:
        model: what clients call the model.
        is_on: whether lines are written.
    """

    def __init__(self, model: str = "", *, is_on: bool = False) -> None:
        self._model = model
        self._is_on = is_on

    def write(self, entry: AccessEntry, principal: Principal | None, status: str) -> None:
        """Log a request that has ended.

        Args:
            principal: whose it was; None: nobody knows.
            status: of HTTP or gRPC.
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
                "model": self._model,
                "prompt_tokens": entry.num_prompt_tokens,
                "output_tokens": entry.num_output_tokens,
                "status": status,
                "error": entry.error or None,
                "ttft_s": None if entry.ttft_s is None else round(entry.ttft_s, 6),
                "duration_s": round(time.perf_counter() - entry.began_at, 6),
            },
        )
