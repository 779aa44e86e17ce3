"""SpanExporter: sends spans to an OpenTelemetry collector, from a thread of its own.

Callers queue their spans and do not wait. Spans that the collector does not accept in time are
dropped and counted. OpenTelemetry's SDK sends the messages, with the certificates, headers,
compression and retries that OTEL_EXPORTER_OTLP_* give. Baton encodes the messages itself, from
plain spans, in a fourth of the time that the SDK needs for its own spans (ADR 0050).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.api.errors import ConfigError
from baton.telemetry.export.environment import check_environment, chosen, endpoint_problem
from baton.telemetry.spans import Span
from baton.version import __version__

logger = logging.getLogger(__name__)

MAX_WAITING = 2**15  # maximum number of queued spans, about ten megabytes
# Maximum number of spans in a message, whose encoding blocks this process for a millisecond or two.
_MOST_AT_ONCE = 256
_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 3.0
_TELL_INTERVAL = 1000  # dropped spans between two warnings


class SpanExporter:
    """Exporter of the spans of one process.

    Args:
        endpoint: URL of the collector, ``http://host:port`` or ``https://host:port``.
        service: name of this program (``service.name``); OTEL_SERVICE_NAME overrides it.
        resource: further attributes of all spans of this process.

    Attributes:
        num_exported, num_dropped: numbers of spans since the start.

    Raises:
        ConfigError: OpenTelemetry is not installed, the endpoint is not a URL, or an environment
            variable has an invalid value.
    """

    def __init__(self, endpoint: str, service: str, resource: dict[str, str]) -> None:
        if problem := endpoint_problem(endpoint):
            raise ConfigError(f"trace_endpoint: {problem}")
        for line in check_environment(os.environ):
            logger.warning("%s", line)
        try:
            self._sender: Any = _make_sender(endpoint, service, resource)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"trace_endpoint: {error.name} is not installed; traces need: "
                "pip install 'baton-serve[otel]'"
            ) from error
        except (ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"OTEL_*: no exporter can be made from these: {why:.200}") from error
        self.num_exported = 0
        self.num_dropped = 0
        self._told_dropped = 0
        self._has_failed = False
        self._waiting: deque[tuple[Sequence[Span], int]] = deque()
        self._num_waiting = 0  # an estimate: threads change the count without a lock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def take(self, spans: Sequence[Span], zero_ns: int) -> None:
        """Queue spans for sending; implements `SpanSink`."""
        if self._num_waiting >= MAX_WAITING:
            self.num_dropped += len(spans)
            return
        self._num_waiting += len(spans)
        self._waiting.append((spans, zero_ns))

    def close(self) -> None:
        """Send the queued spans, for some seconds at most."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._waiting.clear()
        # Let the sending thread give up its retries.
        self._sender.shutdown()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            batch: list[tuple[Span, int]] = []
            while self._waiting and len(batch) < _MOST_AT_ONCE:
                spans, zero_ns = self._waiting.popleft()
                batch += zip(spans, itertools.repeat(zero_ns))
            self._num_waiting = max(self._num_waiting - len(batch), 0)
            if self._send(batch):
                self.num_exported += len(batch)
            else:
                self.num_dropped += len(batch)
            if self.num_dropped >= self._told_dropped + _TELL_INTERVAL:
                self._told_dropped = self.num_dropped
                logger.warning("%d spans are lost: the collector accepts none", self.num_dropped)

    def _send(self, batch: list[tuple[Span, int]]) -> bool:
        """Send spans; return whether the collector accepted them."""
        try:
            return bool(self._sender.export(batch).value == 0)
        # Any exception is caught, because the sending thread must survive whatever a collector
        # answers.
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("spans could not be sent (logged once)", exc_info=True)
            return False


def _make_sender(endpoint: str, service: str, resource: dict[str, str]) -> Any:
    """Make the SDK's exporter, changed to send messages that Baton encoded."""
    for name in [name for name, value in os.environ.items() if name[:5] == "OTEL_" and not value]:
        # An empty variable counts as not set here, but the SDK would use the empty value.
        del os.environ[name]
    from grpc import Compression
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector

    from baton.telemetry.export.otlp import make_request

    own = {"service.name": service, "service.version": __version__, **resource}
    # Attributes in OTEL_RESOURCE_ATTRIBUTES override those of Baton.
    found = OTELResourceDetector().detect().attributes
    attributes = {key: str(value) for key, value in {**own, **found}.items()}

    class Sender(OTLPSpanExporter):
        def _translate_data(self, data: Any) -> Any:
            return make_request(data, attributes)

    is_packed = chosen(os.environ, "COMPRESSION").strip().lower() == "gzip"
    return Sender(
        endpoint=endpoint,
        insecure=endpoint.startswith("http://"),
        compression=Compression.Gzip if is_packed else Compression.NoCompression,
    )
