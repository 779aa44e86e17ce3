"""RequestLog: records of the latest requests, for `baton admin trace` and `baton admin stats`.

Only the dispatcher writes to the log. Records have no texts; only the record of a traced request
holds the prompt, until the request ends.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from baton.api.errors import BatonError, status_name
from baton.api.outputs import FinishReason, Receipt, TextDelta
from baton.telemetry.spans import TraceContext
from router.calls.call import Call

# Maximum number of characters kept of an error's code and text. Thousands of errors are kept, and
# nodes choose some of the texts.
MAX_CODE_CHARS, MAX_ERROR_CHARS = 64, 2048


@dataclass(slots=True)
class AttemptRecord:
    """The record of one attempt; times are seconds since the request reached the router.

    Attributes:
        prefill_node: name of the prefill node; empty: the decode node computed the prompt.
        trace: the attempt's span; None: the request is not traced.
        failed_s: when the attempt failed; None: it has not failed.
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
    """One request's record; times are seconds since the request reached the router.

    Attributes:
        tenant: the caller's tenant.
        received_at: arrival, by `time.time`.
        started_at: arrival, by the log's clock.
        model: served name that the request asked for.
        adapter: digest of the adapter that the name stood for; empty: the base model.
        accepted_s: when the request had been checked and tokenized.
        admitted_s: when the gate admitted the request; None: not yet.
        call: the call; None unless the request is traced.
        trace: the request's span; None: not traced.
        finish_reason: why the output ended; None: the request is open, or ended with an error.
        error_code: name of a gRPC status code.
    """

    request_id: str
    tenant: str = ""
    model: str = ""
    adapter: str = ""
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
    """Keeps the records of the last requests of one base model, on its event loop.

    Args:
        max_requests: maximum number of records kept; the oldest are dropped, even if their
            requests are still open.
        clock: the clock of `Terms.received_at`.

    Attributes:
        on_traced: called with the record of each traced request that has ended.
        num_finished: number of requests that finished without error since the start.
        num_retried: number of these requests that needed more than one attempt.
        num_failed: number of failed requests since the start, by status code.
        num_prompt_tokens: number of prompt tokens of all requests since the start.
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
        # Records by (tenant, request id), the newest request last.
        self._records: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()
        self._open: dict[int, RequestRecord] = {}
        self._num_ended_output_tokens = 0

    def follow(self, call: Call) -> Following:
        """Return a context manager that writes a call's record.

        Enter it before the first attempt; the record ends when the context is left.
        """
        now = self.clock()
        accepted_s = now - call.terms.received_at
        record = RequestRecord(
            request_id=call.request_id,
            tenant=call.terms.principal.tenant,
            model=call.terms.model,
            adapter=call.terms.adapter,
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
        """Return the newest record with this id, or None; ``tenant`` None: of any tenant."""
        if tenant is not None:
            return self._records.get((tenant, request_id))
        return next((one for one in self.latest() if one.request_id == request_id), None)

    def latest(self) -> Iterator[RequestRecord]:
        """Return the records, the newest request first."""
        return iter(reversed(list(self._records.values())))

    @property
    def open(self) -> list[RequestRecord]:
        """Records of requests in progress, oldest first."""
        return list(self._open.values())

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that clients have received since the start."""
        return self._num_ended_output_tokens + sum(
            record.num_output_tokens for record in self._open.values()
        )

    # ------------------------------------------------------------------ called by Following

    def open_record(self, record: RequestRecord) -> None:
        self._open[id(record)] = record
        key = (record.tenant, record.request_id)
        self._records.pop(key, None)  # an id that is used again moves to the end of the order
        self._records[key] = record
        self.num_prompt_tokens += record.num_prompt_tokens
        if len(self._records) > self._max_requests:
            self._records.popitem(last=False)

    def close_record(self, record: RequestRecord) -> None:
        del self._open[id(record)]
        self._num_ended_output_tokens += record.num_output_tokens
        if record.error_code:
            self.num_failed[record.error_code] += 1
        else:
            self.num_finished += 1
            self.num_retried += len(record.attempts) > 1
        if record.trace is not None:
            self.on_traced(record)
            record.call = None  # the call holds the prompt, which is no longer needed


class Following:
    """Writes one call's record from its beginning until it succeeds, fails or is cancelled."""

    def __init__(self, log: RequestLog, record: RequestRecord) -> None:
        self._log = log
        self._record = record

    def __enter__(self) -> Following:
        self._log.open_record(self._record)
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
        self._log.close_record(record)

    @property
    def accepted_s(self) -> float:
        """Seconds from the call's arrival until it had been checked and tokenized."""
        return self._record.accepted_s

    def note_admitted(self) -> None:
        """Note the time at which the gate admitted the call."""
        self._record.admitted_s = self._now_s()

    def note_attempt(self, prefill_node: str, decode_node: str) -> AttemptRecord:
        """Note that an attempt on these nodes begins; return the attempt's record."""
        trace = self._record.trace
        attempt = AttemptRecord(
            self._now_s(), prefill_node, decode_node, trace=trace.child() if trace else None
        )
        self._record.attempts.append(attempt)
        return attempt

    def note_failure(self, code: str, message: str) -> None:
        """Note that the current attempt failed; another attempt may follow."""
        attempt = self._record.attempts[-1]
        attempt.failed_s, attempt.error_code = self._now_s(), code[:MAX_CODE_CHARS]
        # Cut the text, because a node may have chosen a very long one
        attempt.error = message[:MAX_ERROR_CHARS]

    def note_output(self, output: TextDelta) -> None:
        """Note that the client receives these tokens now."""
        record = self._record
        if record.first_token_s is None and output.token_ids:
            record.first_token_s = self._now_s()
        record.num_output_tokens = output.output_index + len(output.token_ids)
        if output.finish_reason is not None and output.receipt is not None:
            self.note_finished(output.finish_reason, output.receipt)

    def note_finished(self, reason: FinishReason, receipt: Receipt) -> None:
        """Note that the call has finished without error."""
        record = self._record
        record.finish_reason, record.receipt = reason, receipt
        record.ended_s = self._now_s()

    def _now_s(self) -> float:
        return self._log.clock() - self._record.started_at
