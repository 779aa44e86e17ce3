"""RequestLog: what became of the last requests, for operators: `trace` and `stats` read it.

One writer, the dispatcher. Knows no prompt and no text, and no RPC.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from baton.api.errors import BatonError, status_name
from baton.api.outputs import FinishReason, Receipt, TextDelta
from baton.telemetry.trace_context import TraceContext
from router.calls.call import Call

# What is kept of an error. There are thousands, and some are what a node says.
MAX_CODE_CHARS, MAX_ERROR_CHARS = 64, 2048


@dataclass(slots=True)
class AttemptRecord:
    """One attempt; times are seconds since the request reached the router.

    Attributes:
        prefill_node: empty: the decode node computes the prompt.
        trace: its span; None: it is not traced.
        failed_s: None: it did not fail (yet).
    """

    began_s: float
    prefill_node: str
    decode_node: str
    trace: TraceContext | None = None
    failed_s: float | None = None
    error_code: str = ""
    error: str = ""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request's life; times are seconds since it reached the router.

    Attributes:
        tenant: whose request it is.
        received_at: by `time.time`.
        started_at: the same by the log's clock.
        accepted_s: it was checked and tokenized.
        admitted_s: its turn had come; None: it has not (yet).
        call: the call itself, of one that is traced.
        trace: its span; None: it is not traced.
        finish_reason: None: it did not finish well (so far).
        error_code: name of a gRPC status code.
    """

    request_id: str
    tenant: str = ""
    received_at: float
    started_at: float
    num_prompt_tokens: int
    max_tokens: int
    accepted_s: float
    admitted_s: float | None = None
    call: Call | None = field(default=None, repr=False)
    trace: TraceContext | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    num_output_tokens: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    error_code: str = ""
    error: str = ""

    @property
    def state(self) -> str:
        if self.ended_s is None:
            return "running" if self.attempts else "queued"
        return "failed" if self.error_code else "finished"


class RequestLog:
    """The last requests of one router, on its event loop.

    Args:
        max_requests: kept; open ones count, too, and may be dropped.
        clock: the one of `Call.received_at`.

    Attributes:
        on_traced: is given each traced request that has ended.
        num_finished: since the start, like all that follow.
        num_retried: finished ones with more than one attempt.
        num_failed: by status code.
        num_prompt_tokens: of all that began.
    """

    def __init__(
        self, max_requests: int = 2000, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_finished = 0
        self.num_retried = 0
        self.num_failed: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.clock = clock
        self.on_traced: Callable[[RequestRecord], None] = lambda record: None
        self.began_at = clock()
        self._max_requests = max_requests
        # By tenant and request id.
        self._records: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()
        self._open: dict[int, RequestRecord] = {}
        self._num_ended_output_tokens = 0

    def follow(self, call: Call) -> Following:
        """Note a call; to be entered before its first attempt and left at its end."""
        now = self.clock()
        accepted_s = now - call.terms.received_at
        record = RequestRecord(
            request_id=call.request_id,
            tenant=call.terms.principal.tenant,
            received_at=time.time() - accepted_s,
            started_at=call.terms.received_at,
            num_prompt_tokens=len(call.prompt_token_ids),
            max_tokens=call.sampling_params.max_tokens,
            accepted_s=accepted_s,
            call=call if call.terms.trace else None,
            trace=call.terms.trace.child() if call.terms.trace else None,
        )
        return Following(self, record)

    def get(self, request_id: str, tenant: str | None = None) -> RequestRecord | None:
        """The last request of that id, if it is still known; None: whoever's it is."""
        if tenant is not None:
            return self._records.get((tenant, request_id))
        return next((one for one in self.latest() if one.request_id == request_id), None)

    def latest(self) -> Iterator[RequestRecord]:
        """The last one first."""
        return iter(reversed(list(self._records.values())))

    @property
    def open(self) -> list[RequestRecord]:
        """In progress, oldest first."""
        return list(self._open.values())

    @property
    def num_output_tokens(self) -> int:
        """That clients got, since the start."""
        return self._num_ended_output_tokens + sum(
            record.num_output_tokens for record in self._open.values()
        )

    # ------------------------------------------------------------------ for Following

    def begin(self, record: RequestRecord) -> None:
        self._open[id(record)] = record
        key = (record.tenant, record.request_id)
        self._records.pop(key, None)  # its id is used again: to the end of the order
        self._records[key] = record
        self.num_prompt_tokens += record.num_prompt_tokens
        if len(self._records) > self._max_requests:
            self._records.popitem(last=False)

    def end(self, record: RequestRecord) -> None:
        del self._open[id(record)]
        self._num_ended_output_tokens += record.num_output_tokens
        if record.error_code:
            self.num_failed[record.error_code] += 1
        else:
            self.num_finished += 1
            self.num_retried += len(record.attempts) > 1
        if record.trace is not None:
            self.on_traced(record)
            record.call = None  # it has the prompt


class Following:
    """Writes one record, from a call's beginning to its end, however that comes."""

    def __init__(self, log: RequestLog, record: RequestRecord) -> None:
        self._log = log
        self._record = record

    def __enter__(self) -> Following:
        self._log.begin(self._record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        record = self._record
        if record.finish_reason is None:
            record.ended_s = self._now_s()
            if isinstance(error, BatonError):
                record.error_code = status_name(error)
                record.error = str(error)[:MAX_ERROR_CHARS]
            elif isinstance(error, Exception):
                record.error_code, record.error = "INTERNAL", type(error).__name__
            else:
                record.error_code, record.error = "CANCELLED", "its client went away"
        self._log.end(record)

    @property
    def accepted_s(self) -> float:
        """See `RequestRecord`."""
        return self._record.accepted_s

    def note_admitted(self) -> None:
        """Its turn has come."""
        self._record.admitted_s = self._now_s()

    def note_attempt(self, prefill_node: str, decode_node: str) -> AttemptRecord:
        """An attempt begins."""
        trace = self._record.trace
        attempt = AttemptRecord(
            self._now_s(), prefill_node, decode_node, trace=trace.child() if trace else None
        )
        self._record.attempts.append(attempt)
        return attempt

    def note_failure(self, code: str, message: str) -> None:
        """The attempt failed; another may follow."""
        attempt = self._record.attempts[-1]
        attempt.failed_s, attempt.error_code = self._now_s(), code[:MAX_CODE_CHARS]
        attempt.error = message[:MAX_ERROR_CHARS]  # a node said it

    def note_output(self, output: TextDelta) -> None:
        """Note tokens that are on their way to the client."""
        record = self._record
        if record.first_token_s is None and output.token_ids:
            record.first_token_s = self._now_s()
        record.num_output_tokens = output.output_index + len(output.token_ids)
        if output.finish_reason is not None and output.receipt is not None:
            self.finish(output.finish_reason, output.receipt)

    def finish(self, reason: FinishReason, receipt: Receipt) -> None:
        """The call ended well."""
        record = self._record
        record.finish_reason, record.receipt = reason, receipt
        record.ended_s = self._now_s()

    def _now_s(self) -> float:
        return self._log.clock() - self._record.started_at
