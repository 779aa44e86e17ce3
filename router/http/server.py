"""HttpServer: the paths of the HTTP API, on the router's own event loop."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import hdrs, web

from baton.access import Access
from baton.audit_log import AuditKind
from baton.call_roles import ANY, INFER, LOOK, OPEN, Roles
from baton.errors import ConfigError, InvalidRequestError
from baton.identity import Credentials
from baton.rpc import MAX_CLIENT_MESSAGE_BYTES, split_address
from router.http.chat import chat_completions
from router.http.completions import completions
from router.http.errors import ApiError, error_middleware, error_response
from router.http.exchange import PRINCIPAL, REQUEST_ID, unknown_model
from router.http.responses import ModelList, ModelObject
from router.intake import MAX_REQUEST_ID_CHARS, Intake, check_name
from router.metrics import RouterMetrics
from router.node_pool import NodePool

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

REQUEST_ID_HEADER = "X-Request-Id"
# What a client's request is refused as, if nobody knows who it is, before the path is looked at.
_UNKNOWN_PATH = ANY
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpServer:
    """Serves the HTTP API.

    Args:
        model_name: what clients call the model.
        access: knows who may call.
        cors_origin: web pages of this origin ("*": of all) may call; empty: none may.
        grace_s: when it stops, requests in progress have so long to end.
    """

    def __init__(
        self,
        intake: Intake,
        pool: NodePool,
        metrics: RouterMetrics,
        *,
        model_name: str,
        access: Access | None = None,
        cors_origin: str = "",
        grace_s: float = 0.0,
    ) -> None:
        self._intake = intake
        self._pool = pool
        self._metrics = metrics
        self._model_name = model_name
        self._access = access or Access()
        self._cors_origin = cors_origin
        self._created = int(time.time())
        app = web.Application(
            client_max_size=MAX_CLIENT_MESSAGE_BYTES,
            middlewares=[self._name_and_preflight, error_middleware, self._authenticate],
        )
        app.on_response_prepare.append(self._add_headers)
        # Every path with the role that it wants; what is not here is there for nobody.
        routes: list[tuple[str, str, Handler, Roles | None]] = [
            (hdrs.METH_POST, "/v1/completions", self._completions, INFER),
            (hdrs.METH_POST, "/v1/chat/completions", self._chat_completions, INFER),
            (hdrs.METH_GET, "/v1/models", self._models, INFER),
            (hdrs.METH_GET, "/v1/models/{model:.+}", self._model, INFER),
            # Load balancers and kubelets bring no key: these two say yes or no, and nothing else.
            (hdrs.METH_GET, "/health", self._health, OPEN),
            (hdrs.METH_GET, "/ready", self._ready, OPEN),
            (hdrs.METH_GET, "/metrics", self._show_metrics, LOOK),
        ]
        self._roles = {handler: roles for _, _, handler, roles in routes}
        for method, path, handler, _ in routes:
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=grace_s
        )

    async def start(self, listen: str) -> str:
        """Listen on ``host:port`` (port 0: any free one) and return the address with its port.

        Raises ConfigError when the address is malformed or in use.
        """
        host, port = split_address("http_listen", listen)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), port).start()
        except OSError as error:
            await self._runner.cleanup()
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            raise ConfigError(
                f'http_listen: cannot listen on {listen} ({why}); choose another, or "" for no HTTP'
            ) from error
        return f"{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop accepting requests, and end those in progress after their grace."""
        await self._runner.cleanup()

    # ------------------------------------------------------------------ all responses

    @web.middleware
    async def _name_and_preflight(self, request: web.Request, handler: Handler) -> Any:
        """Give the request its id; answer what browsers ask before they call."""
        request_id = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = uuid.uuid4().hex
        try:
            check_name(REQUEST_ID_HEADER, request_id, MAX_REQUEST_ID_CHARS)
        except InvalidRequestError as error:
            return error_response(error)
        if request_id:
            request[REQUEST_ID] = request_id
        is_preflight = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method == hdrs.METH_OPTIONS and is_preflight and self._cors_origin:
            return web.Response(status=204)
        return await handler(request)

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> Any:
        """Find out whose request it is, and whether it may, by what would serve it.

        Not by what the path looks like: a path that nobody serves has no handler of ours, and then
        who is unknown is not told so much.
        """
        roles = self._roles.get(request.match_info.handler, _UNKNOWN_PATH)
        if roles is not OPEN:
            credentials = Credentials(
                authorization=request.headers.get(hdrs.AUTHORIZATION, ""),
                address=request.remote or "",
            )
            call = f"{request.method} {request.path}"
            principal = self._access.admit(credentials, roles, call)
            request[PRINCIPAL] = principal
            if roles is LOOK:
                self._access.note(AuditKind.LOOKED, principal, credentials.address, call)
        return await handler(request)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if request_id := request.get(REQUEST_ID):
            response.headers[REQUEST_ID_HEADER] = request_id
        if self._cors_origin:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = self._cors_origin
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = "GET, POST"
            asked_for = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
            if asked_for:
                response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked_for
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = REQUEST_ID_HEADER

    # ------------------------------------------------------------------ paths

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await completions(request, self._intake, self._model_name)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await chat_completions(request, self._intake, self._model_name)

    async def _models(self, request: web.Request) -> web.Response:
        return _json(ModelList([self._model_object()]))

    async def _model(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        if model != self._model_name:
            raise unknown_model(model, self._model_name)
        return _json(self._model_object())

    async def _health(self, request: web.Request) -> web.Response:
        """The process lives."""
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        """A request could be served now."""
        if not self._pool.fleet:
            why = self._pool.why_no_pair() if self._access.is_open else "no nodes are ready"
            raise ApiError(503, why)
        return web.Response(text="ready\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={hdrs.CONTENT_TYPE: _METRICS_TYPE})

    def _model_object(self) -> ModelObject:
        return ModelObject(self._model_name, self._created, self._intake.max_model_len)


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
