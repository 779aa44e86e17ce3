"""MetricsPage: a Prometheus page over HTTP, and two paths for probes beside it.

Knows no node: a collector says what is on the page, a function whether the node is ready.
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
# Those who scrape are few; whoever else comes takes nothing from the node.
_LIMITS = ConnectionLimits(
    max_connections=64,
    max_connections_per_address=64,
    header_timeout_s=5.0,
    idle_timeout_s=90.0,  # longer than the pause between two scrapes
    stall_timeout_s=10.0,
)


class MetricsPage:
    """Serves ``/metrics``, ``/health`` and ``/ready`` on the caller's loop until it is closed.

    The last two are open to anybody, as kubelets and load balancers show neither key nor
    certificate: ``/health`` answers as long as the loop does, and ``/ready`` says yes or 503.

    Args:
        collector: asked on a thread, by one scrape at a time.
        access: knows who may look; if not given, who reaches the page may.
        limits: of connections.
        tls: what it serves HTTPS with, and whose certificates count if one is shown; None: HTTP.
        is_ready: what ``/ready`` says.

    Attributes:
        address: ``host:port`` that it listens on, once it is started.
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
        # Nobody must show a certificate: probes have none, and who shows none may not look.
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
        """Listen on ``host:port``; port 0 is any free one. Raises ConfigError if that fails."""
        await self._runner.setup()
        self.address = await self._listener.start("metrics_listen", listen, ssl_context=self._tls)
        scheme = "http" if self._tls is None else "https"
        logger.info("metrics at %s://%s/metrics", scheme, self.address)

    async def close(self) -> None:
        """Listen no more, and end the scrapes that are being answered."""
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
        """Answer what is open to anybody; None: it is not."""
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
