"""SpanExporter: sends spans to an OpenTelemetry collector, from a thread of its own.

Who has spans leaves them here and goes on. What a collector does not take in time is dropped and
counted; nothing waits for it. The SDK sends (certificates, headers, compression and tries as
OTEL_EXPORTER_OTLP_* say); that the messages are made here, of plain values, takes a fourth of what
its own spans take (ADR 0050).
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

MAX_WAITING = 2**15  # spans; some ten megabytes
_MOST_AT_ONCE = 256  # made in a millisecond or two, in which nothing else of this process runs
_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 3.0
_TELL_INTERVAL = 1000  # lost spans


class SpanExporter:
    """Of one process.

    Args:
        endpoint: of the collector, ``http://host:port`` or ``https://host:port``.
        service: name of this program, ``service.name``; OTEL_SERVICE_NAME goes before it.
        resource: what else is true of all spans of this process.

    Attributes:
        num_exported, num_dropped: spans, since the start.

    Raises:
        ConfigError: OpenTelemetry is not installed, the endpoint is no URL, or a variable of the
            environment has a value that the exporter cannot use.
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
            raise ConfigError(f"OTEL_*: no exporter can be made of these: {why:.200}") from error
        self.num_exported = 0
        self.num_dropped = 0
        self._told_dropped = 0
        self._has_failed = False
        self._waiting: deque[tuple[Sequence[Span], int]] = deque()
        self._num_waiting = 0  # an estimate: threads do not wait for one another
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def take(self, spans: Sequence[Span], zero_ns: int) -> None:
        """A `SpanSink`."""
        if self._num_waiting >= MAX_WAITING:
            self.num_dropped += len(spans)
            return
        self._num_waiting += len(spans)
        self._waiting.append((spans, zero_ns))

    def close(self) -> None:
        """Send what waits, for some seconds at most."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._waiting.clear()
        self._sender.shutdown()  # it tries no more
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
                logger.warning("%d spans are lost: the collector takes none", self.num_dropped)

    def _send(self, batch: list[tuple[Span, int]]) -> bool:
        """Return whether the collector has taken them."""
        try:
            return bool(self._sender.export(batch).value == 0)
        except Exception:  # the top of this thread: what a collector answers may be anything
            if not self._has_failed:
                self._has_failed = True
                logger.warning("spans could not be sent (told once)", exc_info=True)
            return False


def _make_sender(endpoint: str, service: str, resource: dict[str, str]) -> Any:
    """The SDK's exporter, but for how messages are made."""
    for name in [name for name, value in os.environ.items() if name[:5] == "OTEL_" and not value]:
        del os.environ[name]  # an empty value is none, but the SDK reads it
    from grpc import Compression
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector

    from baton.telemetry.export.otlp import make_request

    own = {"service.name": service, "service.version": __version__, **resource}
    found = OTELResourceDetector().detect().attributes  # the environment's words go before ours
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
