"""MetricsPage: serves a Prometheus page over HTTP, with two paths for probes.

Knows no node: a collector makes the page, and a function tells whether the node is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from baton.access.access import Access
from baton.access.audit_log import AuditKind
from baton.access.call_roles import LOOK
from baton.access.credentials import http_credentials
from baton.access.tls import ServerContext, TlsFiles
from baton.api.errors import HTTP_STATUS_OF, BatonError, status_name
from baton.serving.connection_limits import ConnectionLimits
from baton.serving.connections import Listener

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Limits of connections: few clients scrape metrics, and others must not burden the node.
_LIMITS = ConnectionLimits(
    max_connections=64,
    max_connections_per_address=64,
    header_timeout_s=5.0,
    idle_timeout_s=90.0,  # longer than the pause between scrapes
    stall_timeout_s=10.0,
)


class MetricsPage:
    """HTTP server of ``/metrics``, ``/health`` and ``/ready`` on the caller's event loop.

    `/health` and `/ready` need no key or certificate, because kubelets and load balancers have
    none: ``/health`` answers 200 while the event loop runs; ``/ready`` answers 200 or 503.

    Args:
        collector: makes the metrics page; called on a thread, for one scrape at a time.
        access: decides who may read the page; None: anybody.
        limits: limits of connections.
        tls: certificates for HTTPS, and CA for client certificates; None: HTTP.
        is_ready: returns whether ``/ready`` answers 200.

    Attributes:
        address: ``host:port`` of the page once it is started.
    """

    def __init__(
        self,
        collector: Collector,
        limits: ConnectionLimits = _LIMITS,
        *,
        access: Access | None = None,
        tls: TlsFiles | None = None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.address = ""
        self._access = access or Access()
        self._is_ready = is_ready
        # Client certificates are optional, because probes have none. Callers without a certificate
        # may not read the metrics.
        self._tls = None if tls is None else ServerContext.of(tls, require_client_certs=False)
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        self._scraping = asyncio.Lock()
        self._runner = web.ServerRunner(
            web.Server(
                self._answer,
                access_log=None,
                keepalive_timeout=limits.idle_timeout_s,
                lingering_time=0,
                auto_decompress=False,
            )
        )
        self._listener = Listener(self._make_protocol, limits)

    async def start(self, listen: str) -> None:
        """Listen on ``host:port`` (port 0: any free one); raises ConfigError on failure."""
        await self._runner.setup()
        self.address = await self._listener.start("metrics_listen", listen, ssl_context=self._tls)
        scheme = "http" if self._tls is None else "https"
        logger.info("metrics at %s://%s/metrics", scheme, self.address)

    async def close(self) -> None:
        """Stop listening, and end scrapes in progress."""
        self._listener.close()
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        with self._listener.working(request.protocol):
            if (probed := self._answer_probe(request)) is not None:
                return probed
            shown, call = http_credentials(request), f"{request.method} metrics page"
            try:
                principal = self._access.admit(shown, LOOK, call)
            except BatonError as error:
                status = HTTP_STATUS_OF[status_name(error)]
                asks = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
                return web.Response(status=status, text=f"{error}\n", headers=asks)
            self._access.note(AuditKind.LOOKED, principal, shown.address, call)
            if request.path not in ("/", "/metrics") or request.method not in ("GET", "HEAD"):
                return web.Response(status=404, text="there is /metrics\n")
            async with self._scraping:
                text = await asyncio.to_thread(generate_latest, self._registry)
            return web.Response(body=text, headers={hdrs.CONTENT_TYPE: METRICS_TYPE})

    def _answer_probe(self, request: web.BaseRequest) -> web.Response | None:
        """Answer a probe; return None for other paths."""
        if request.method not in ("GET", "HEAD"):
            return None
        if request.path == "/health":
            return web.Response(text="ok\n")
        if request.path == "/ready":
            is_ready = self._is_ready()
            return web.Response(
                status=200 if is_ready else 503, text="ready\n" if is_ready else "not ready\n"
            )
        return None

    def _make_protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None  # set up
        return server()
