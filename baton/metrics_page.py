"""MetricsPage: a Prometheus page over HTTP. Knows no node: a collector says what is on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.registry import Collector

from baton.access import Access
from baton.audit_log import AuditKind
from baton.call_roles import LOOK
from baton.errors import HTTP_STATUS_OF, BatonError, ConfigError, UnauthenticatedError, status_name
from baton.identity import Credentials
from baton.rpc import split_address, warn_if_public

logger = logging.getLogger(__name__)


class MetricsPage:
    """Serves ``/metrics`` on threads of its own until it is closed.

    Args:
        listen: ``host:port``; port 0 is any free one.
        collector: asked at each scrape, on the scrape's thread.
        access: knows who may look; if not given, who reaches the page may.

    Attributes:
        address: ``host:port`` that it listens on.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, listen: str, collector: Collector, access: Access | None = None) -> None:
        host, port = split_address("metrics_listen", listen)
        registry = CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"metrics_listen: cannot listen on {listen}: {error.strerror}"
            ) from error
        self._server.set_app(_guarded(make_wsgi_app(registry), access or Access()))
        registry.register(collector)  # it listens already, and until now there was nothing to see
        self.address = f"{host}:{self._server.server_port}"
        warn_if_public(self.address, authenticated=access is not None and not access.is_open)
        logger.info("metrics at http://%s/metrics", self.address)

    def close(self) -> None:
        """Listen no more; a scrape that is being answered ends by itself."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _guarded(page: Callable[..., Iterable[bytes]], access: Access) -> Callable[..., Any]:
    """The page for who may look, whatever the path is."""

    def guarded(environ: dict[str, str], start_response: Callable[..., Any]) -> Iterable[bytes]:
        credentials = Credentials(
            authorization=environ.get("HTTP_AUTHORIZATION", ""),
            address=environ.get("REMOTE_ADDR", ""),
        )
        call = f"{environ['REQUEST_METHOD']} metrics page"
        try:
            principal = access.admit(credentials, LOOK, call)
        except BatonError as error:
            code = HTTP_STATUS_OF[status_name(error)]
            asks = isinstance(error, UnauthenticatedError)
            start_response(
                f"{code} {status_name(error)}", [("WWW-Authenticate", "Bearer")] if asks else []
            )
            return [f"{error}\n".encode()]
        access.note(AuditKind.LOOKED, principal, credentials.address, call)
        return page(environ, start_response)

    return guarded
