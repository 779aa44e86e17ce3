"""MetricsPage: a Prometheus page over HTTP. Knows no node: a collector says what is on it."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from baton.errors import ConfigError
from baton.exposure import split_address

logger = logging.getLogger(__name__)


class MetricsPage:
    """Serves ``/metrics`` on threads of its own until it is closed.

    Args:
        listen: ``host:port``; port 0 is any free one.
        collector: asked at each scrape, on the scrape's thread.

    Attributes:
        address: ``host:port`` that it listens on.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, listen: str, collector: Collector) -> None:
        host, port = split_address("metrics_listen", listen)
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"metrics_listen: cannot listen on {listen}: {error.strerror}"
            ) from error
        self.address = f"{host}:{self._server.server_port}"
        logger.info("metrics at http://%s/metrics", self.address)

    def close(self) -> None:
        """Listen no more; a scrape that is being answered ends by itself."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
