"""HttpServer: serves all paths of the HTTP API, on the router's own event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from baton.access.access import Access
from baton.access.audit_log import AuditKind
from baton.access.call_roles import ANY, INFER, LOOK, OPEN, OPERATE, Roles
from baton.access.credentials import http_credentials, page_credentials
from baton.api.errors import (
    HTTP_STATUS_OF,
    BatonError,
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    status_name,
)
from baton.api.prompt import check_name
from baton.serving.access_log import AccessEntry, AccessLog
from baton.serving.connection_limits import ConnectionCounts, ConnectionLimits
from baton.serving.connections import Listener
from baton.serving.held_calls import HeldCalls
from baton.serving.rpc import MAX_CLIENT_MESSAGE_BYTES
from baton.telemetry.spans import TRACEPARENT, TRACESTATE
from baton.telemetry.tracing import NO_TRACING, Tracing
from baton.version import __version__
from router.api.admin.adapters import AdapterAdmin
from router.api.admin.lora_paths import LoadLoraRequest, LoraPaths, UnloadLoraRequest
from router.api.anthropic_messages.api import count_tokens, messages
from router.api.anthropic_messages.request import CountTokensRequest, MessagesRequest
from router.api.http.chat import chat_completions
from router.api.http.completions import completions
from router.api.http.decoding import prepare_decoding
from router.api.http.errors import (
    MESSAGES_REQUEST_ID_HEADER,
    REQUEST_ID,
    ApiError,
    error_middleware,
    error_response,
    is_of_messages,
)
from router.api.http.exchange import BODIES, ENTRY, PRINCIPAL, HttpOptions, list_name
from router.api.http.ignored_fields import IGNORED_FIELDS, IGNORED_FIELDS_HEADER, IgnoredFieldsLog
from router.api.http.responses import LoadObject, ModelList, ModelObject, VersionObject
from router.api.http.schema import ChatRequest, CompletionRequest
from router.api.http.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from router.api.images.image_fetch import FETCHER, ImageFetcher
from router.api.openai_responses.api import responses
from router.api.openai_responses.request import ResponsesRequest
from router.api.pooling.classify import ClassifyRequest, classify
from router.api.pooling.embeddings import EmbeddingRequest, embeddings
from router.api.pooling.rerank import RerankRequest, rerank
from router.api.pooling.score import ScoreRequest, score
from router.api.sessions.hints import DropRequest, PrefetchRequest, answer_drop, answer_prefetch
from router.api.ui.page import StatusPage
from router.gate.overload import Overload
from router.gate.rate_limits import REQUESTS, TOKENS, Rate
from router.intake.images.image_options import ImageOptions
from router.intake.intake import MAX_REQUEST_ID_CHARS
from router.names.metrics_page import MetricsPage
from router.names.served_name import ServedName
from router.names.table import NameTable

if TYPE_CHECKING:
    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.typedefs import Handler

REQUEST_ID_HEADER = "X-Request-Id"
UI = "/ui"
_Serve = Callable[[web.Request, HttpOptions], Awaitable[web.StreamResponse | msgspec.Struct]]
_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_MakeRequest = Callable[..., web.BaseRequest]
_SLASHES = re.compile("//+")
POOLED: dict[str, _Serve] = {
    "/v1/embeddings": embeddings,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
    **dict.fromkeys(("/score", "/v1/score"), score),
    **dict.fromkeys(("/classify", "/v1/classify"), classify),
}
# Path of each API that runs the model -> its handler.
SERVED: dict[str, _Serve] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/sessions/prefetch": answer_prefetch,
    "/v1/sessions/drop": answer_drop,
    **POOLED,
}
# Structs of the request bodies that the handlers above read.
BODY_KINDS = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountTokensRequest,
    TokenizeRequest, DetokenizeRequest, LoadLoraRequest, UnloadLoraRequest, EmbeddingRequest,
    RerankRequest, ScoreRequest, ClassifyRequest, PrefetchRequest, DropRequest,
)  # fmt: skip
NOT_SERVED = (
    "/pooling", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech",
    "/v1/audio/transcriptions",
)  # fmt: skip
# Seconds for which the server reads and drops the rest of a body after it has answered. Without
# this, a client that is still sending would not read the answer.
_LINGERING_S = 2.0
# An unknown path requires a key with any role, so that callers without a key learn nothing about
# the paths.
_UNKNOWN_PATH = ANY
# Roles that a path requires -> the kind of access in the audit log.
_NOTED = {LOOK: AuditKind.LOOKED, OPERATE: AuditKind.CHANGED}
_RATE_WORDS = {REQUESTS: "requests", TOKENS: "tokens"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpServer:
    """Serves the HTTP API.

    Args:
        names: model names that clients may use.
        metrics: the metrics page.
        strict_fields: whether a field without effect is an error.
        access: authenticates callers and checks their roles.
        cors_origin: origin whose web pages may call this API ("*": any origin); empty: none.
        grace_s: seconds that requests in progress have to end when the server stops.
        limits: limits of clients' connections.
        overload: decides when requests are refused because the router is overloaded.
        tls: context for HTTPS; None: HTTP.
        access_log: logs requests that have ended.
        status_page: status page for operators; None: no page.
        tracing: decides which requests are traced; None: no request.
        adapters: changes the adapters; by default an `AdapterAdmin` without a root.
        images: hosts and limits of images that requests name by URL; by default, no host is
            allowed.
    """

    def __init__(
        self,
        names: NameTable,
        metrics: MetricsPage,
        *,
        strict_fields: bool = False,
        access: Access | None = None,
        cors_origin: str = "",
        grace_s: float = 0.0,
        limits: ConnectionLimits | None = None,
        overload: Overload | None = None,
        tls: ssl.SSLContext | None = None,
        access_log: AccessLog | None = None,
        status_page: StatusPage | None = None,
        tracing: Tracing = NO_TRACING,
        adapters: AdapterAdmin | None = None,
        images: ImageOptions | None = None,
    ) -> None:
        self._names = names
        lora = LoraPaths(adapters or AdapterAdmin(names))
        self._metrics = metrics
        self._options = HttpOptions(names=names, strict_fields=strict_fields)
        self._ignored_fields = IgnoredFieldsLog()
        self._access = access or Access()
        self._cors_origin = cors_origin
        self._tls = tls
        self._access_log = access_log or AccessLog()
        self._tracing = tracing
        self._created = int(time.time())
        self._is_stopping = False
        self._overload = overload or Overload()
        app = web.Application(
            client_max_size=MAX_CLIENT_MESSAGE_BYTES,
            middlewares=[
                self._note_work,
                self._name_and_preflight,
                self._log_access,
                error_middleware,
                self._authenticate,
            ],
        )
        app[BODIES] = HeldCalls()
        app[FETCHER] = ImageFetcher(images)
        app.on_response_prepare.append(self._add_headers)
        # (method, path, handler, roles that a caller needs) of every path.
        routes: list[tuple[str, str, Handler, Roles | None]] = [
            *((hdrs.METH_POST, path, self._of(serve), INFER) for path, serve in SERVED.items()),
            *((hdrs.METH_POST, path, self._not_served, INFER) for path in NOT_SERVED),
            (hdrs.METH_GET, "/v1/models", self._models, INFER),
            (hdrs.METH_GET, "/v1/models/{model:.+}", self._model, INFER),
            # Open to all: load balancers and kubelets have no key. The paths answer yes or no.
            (hdrs.METH_GET, "/health", self._health, OPEN),
            (hdrs.METH_GET, "/ping", self._ping, OPEN),
            (hdrs.METH_POST, "/ping", self._ping, OPEN),
            (hdrs.METH_GET, "/ready", self._ready, OPEN),
            (hdrs.METH_GET, "/version", self._version, ANY),
            (hdrs.METH_GET, "/load", self._load, LOOK),
            (hdrs.METH_GET, "/metrics", self._show_metrics, LOOK),
            (hdrs.METH_POST, "/v1/load_lora_adapter", lora.load, OPERATE),
            (hdrs.METH_POST, "/v1/unload_lora_adapter", lora.unload, OPERATE),
            *_pages_of(status_page),
        ]
        self._pages = {handler for _, path, handler, _ in routes if path.startswith(UI)}
        self._roles = {handler: roles for _, _, handler, roles in routes}
        for method, path, handler, _ in routes:
            app.router.add_route(method, path, handler)
        limits = limits or ConnectionLimits()
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=grace_s,
            keepalive_timeout=limits.idle_timeout_s,
            lingering_time=_LINGERING_S,
            auto_decompress=False,  # a body of a few bytes could inflate to megabytes
            logger=_logger_of_protocol(),
        )
        self._listener = Listener(self._make_protocol, limits)

    @property
    def connections(self) -> ConnectionCounts:
        """Counts of the HTTP connections that are open, and of those that the server cut."""
        return self._listener.counts

    async def start(self, listen: str) -> str:
        """Listen on ``host:port`` (port 0: any free port); return the address with its port.

        Raises ConfigError if the address is malformed or in use.
        """
        for kind in BODY_KINDS:
            prepare_decoding(kind)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None  # made by `setup`
        server.request_factory = _with_plain_paths(server.request_factory)
        server.request_handler = _checking_expectations(server.request_handler)
        try:
            return await self._listener.start("http_listen", listen, ssl_context=self._tls)
        except ConfigError as error:
            await self._runner.cleanup()
            raise ConfigError(f'{error}; choose another, or "" for no HTTP') from None

    @property
    def num_at_work(self) -> int:
        """Number of requests in progress, whose answers are not completely written."""
        return self._listener.counts.at_work

    @property
    def share_at_work(self) -> float:
        """Number of connections with a request in progress, divided by the allowed connections."""
        return self._listener.counts.at_work / self._listener.limits.max_connections

    def announce_stop(self) -> None:
        """Make ``/ready`` answer no, and close each connection after its next answer."""
        self._is_stopping = True

    async def stop(self) -> None:
        """Stop accepting connections; end the requests in progress after the grace time."""
        self._listener.stop_accepting()
        await self._runner.cleanup()
        self._listener.close()

    def _make_protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None  # made by `setup`
        return server()

    # ------------------------------------------------------------------ all responses

    @web.middleware
    async def _note_work(self, request: web.Request, handler: Handler) -> Any:
        """Count the request as in progress while its handler runs.

        Refuses compressed bodies; refuses every POST request while the router is overloaded.
        """
        with self._listener.working(request.protocol):
            coding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
            if coding.lower() != "identity":
                message = f"{hdrs.CONTENT_ENCODING}: must be identity, got {coding[:20]!a}"
                return error_response(request, ApiError(415, message))
            if request.method == hdrs.METH_POST:
                try:
                    self._overload.check()  # a refusal costs least before the body is read
                except OverloadedError as error:
                    return error_response(request, error)
            return await handler(request)

    @web.middleware
    async def _name_and_preflight(self, request: web.Request, handler: Handler) -> Any:
        """Give the request an id for logs and errors, and answer CORS preflight requests."""
        request_id = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = uuid.uuid4().hex
        try:
            check_name(REQUEST_ID_HEADER, request_id, MAX_REQUEST_ID_CHARS)
        except InvalidRequestError as error:
            return error_response(request, error)
        if request_id:
            request[REQUEST_ID] = request_id
        is_preflight = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method == hdrs.METH_OPTIONS and is_preflight and self._cors_origin:
            return web.Response(status=204)
        with structlog.contextvars.bound_contextvars(request_id=request[REQUEST_ID]):
            return await handler(request)

    @web.middleware
    async def _log_access(self, request: web.Request, handler: Handler) -> Any:
        """Write a client's request to the access log when it ends.

        Requests of operators and probes are not logged.
        """
        entry = request[ENTRY] = AccessEntry(
            call=f"{request.method} {request.path}",
            address=request.remote or "",
            request_id=request[REQUEST_ID],
        )
        is_clients = self._roles.get(request.match_info.handler, INFER) is INFER
        headers = request.headers
        entry.join_trace(
            self._tracing if is_clients else NO_TRACING,
            headers.get(TRACEPARENT, ""),
            headers.get(TRACESTATE, ""),
        )
        status = HTTP_STATUS_OF["CANCELLED"]
        try:
            with structlog.contextvars.bound_contextvars(trace_id=entry.trace_id or None):
                response: web.StreamResponse = await handler(request)
            status = response.status
            return response
        finally:
            if is_clients:
                self._access_log.write(entry, request.get(PRINCIPAL), str(status))

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> Any:
        """Authenticate the caller, and check that its role allows this path.

        The handler that aiohttp found decides which role is required, because one path may be
        spelled in several ways. Unknown paths require a key, so callers without a key learn nothing
        about the paths.
        """
        roles = self._roles.get(request.match_info.handler, _UNKNOWN_PATH)
        if roles is not OPEN:
            is_page = request.match_info.handler in self._pages
            shown = page_credentials(request) if is_page else http_credentials(request)
            call = f"{request.method} {request.path}"
            try:
                principal = self._access.admit(shown, roles, call)
            except BatonError as error:
                if not is_page:
                    raise
                return _ask_for_key(error)
            request[PRINCIPAL] = principal
            if roles in _NOTED:
                self._access.note(_NOTED[roles], principal, shown.address, call)
        return await handler(request)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._is_stopping or self._overload.level:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"
        if request_id := request.get(REQUEST_ID):
            response.headers[REQUEST_ID_HEADER] = request_id
            if is_of_messages(request):
                response.headers[MESSAGES_REQUEST_ID_HEADER] = request_id
        if ignored := request.get(IGNORED_FIELDS):
            response.headers[IGNORED_FIELDS_HEADER] = ", ".join(ignored)
            self._ignored_fields.note(ignored, request_id or "")
        if principal := request.get(PRINCIPAL):
            admission = self._names.bases[0].dispatcher.admission
            response.headers.update(_rate_headers(admission.rates_of(principal)))
        if self._cors_origin:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = self._cors_origin
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = "GET, POST"
            asked_for = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
            if asked_for:
                response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked_for
            exposed = f"{REQUEST_ID_HEADER}, {IGNORED_FIELDS_HEADER}"
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = exposed

    # ------------------------------------------------------------------ paths

    def _of(self, serve: _Serve) -> Handler:
        """Wrap the function that answers a path into a handler of aiohttp."""

        async def handle(request: web.Request) -> web.StreamResponse:
            answer = await serve(request, self._options)
            return answer if isinstance(answer, web.StreamResponse) else _json(answer)

        return handle

    async def _not_served(self, request: web.Request) -> web.Response:
        """Refuse a path of OpenAI's or vLLM's API for models that do not write text."""
        raise ApiError(
            501,
            f"path: {request.path} is for models of another kind: {self._names.names[0]!r} writes "
            "text",
            code="not_supported",
        )

    async def _models(self, request: web.Request) -> web.Response:
        served, own_names = self._names.served_to(request[PRINCIPAL]), self._names.own_names()
        return _json(ModelList([self._model_object(one, own_names[one.base]) for one in served]))

    async def _model(self, request: web.Request) -> web.Response:
        served = list_name(self._names, request.match_info["model"], request[PRINCIPAL])
        return _json(self._model_object(served, self._names.own_names()[served.base]))

    async def _health(self, request: web.Request) -> web.Response:
        """Answer that the process is alive."""
        return web.Response(text="ok\n")

    async def _ping(self, request: web.Request) -> web.Response:
        """Answer that the process is alive, at another path that load balancers commonly use."""
        return web.Response(text="ok\n")

    async def _version(self, request: web.Request) -> web.Response:
        return _json(VersionObject(__version__))

    async def _load(self, request: web.Request) -> web.Response:
        """Return the number of open requests, in the form of vLLM's ``/load``."""
        return _json(LoadObject(sum(base.intake.num_open for base in self._names.bases)))

    async def _ready(self, request: web.Request) -> web.Response:
        """Answer whether the router could serve a request now."""
        if self._is_stopping:
            raise ApiError(503, "the router is stopping")
        bases = self._names.bases
        if any(base.intake.reader.is_starting for base in bases):
            raise ApiError(503, "the processes that read requests are starting")
        if not any(base.intake.abilities.is_ready for base in bases):
            why = (
                bases[0].intake.abilities.why_not_ready
                if self._access.is_open
                else "no nodes are ready"
            )
            raise ApiError(503, why)
        return web.Response(text="ready\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={hdrs.CONTENT_TYPE: _METRICS_TYPE})

    def _model_object(self, served: ServedName, own_name: str) -> ModelObject:
        return ModelObject(
            served.name,
            self._created,
            served.intake.max_model_len,
            root=served.adapter or own_name,
            parent=own_name if served.adapter else None,
            input_modalities=("text", "image") if served.intake.reader.images else ("text",),
        )


def _pages_of(page: StatusPage | None) -> list[tuple[str, str, Handler, Roles | None]]:
    """Return the routes of the status page; its style sheet and script need no key."""
    if page is None:
        return []
    return [
        (hdrs.METH_GET, "/", _go_to_page, OPEN),
        (hdrs.METH_GET, UI, page.show_all, LOOK),
        (hdrs.METH_GET, f"{UI}/requests/{{request_id:[^/]+}}", page.show_request, LOOK),
        (hdrs.METH_GET, f"{UI}/{{name:ui.(?:css|js)}}", page.show_file, OPEN),
    ]


async def _go_to_page(request: web.Request) -> web.Response:
    """Redirect browsers that open the root to the status page."""
    return web.Response(status=302, headers={hdrs.LOCATION: UI})


def _ask_for_key(error: BatonError) -> web.Response:
    """Return a response that makes a browser ask its user for an API key."""
    status = HTTP_STATUS_OF[status_name(error)]
    asks = {hdrs.WWW_AUTHENTICATE: 'Basic realm="Baton: an API key as password"'}
    return web.Response(status=status, text=f"{error}\n", headers=asks if status == 401 else {})


def _checking_expectations(handle: _Handle) -> _Handle:
    """Wrap aiohttp's handler, so that this server itself refuses an unknown `Expect` header.

    aiohttp would quote the header's value, and fail if the value is not UTF-8.
    """

    async def check(request: web.BaseRequest) -> web.StreamResponse:
        expected = request.headers.get(hdrs.EXPECT, "").lower()
        if expected not in ("", "100-continue") and request.version >= HttpVersion11:
            problem = f"{hdrs.EXPECT}: must be 100-continue, got {expected[:20]!a}"
            return error_response(request, ApiError(417, problem))
        return await handle(request)

    return check


def _with_plain_paths(make_request: _MakeRequest) -> _MakeRequest:
    """Wrap aiohttp's factory of requests to read `/v1//models/` as `/v1/models`.

    Clients often join URLs with double slashes, and many do not follow a redirect of a POST.
    """

    def make(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        path = message.url.raw_path
        plain = _SLASHES.sub("/", path).removesuffix("/") or "/"
        if plain != path:
            url = message.url.with_path(plain, encoded=True, keep_query=True)
            message = message._replace(url=url, path=str(url))
        return make_request(message, *rest)

    return make


def _logger_of_protocol() -> logging.Logger:
    """Return a logger that drops aiohttp's reports of malformed HTTP requests.

    Senders of malformed requests get an error anyway. Anybody can send any number of them, and a
    report's text may contain a key.
    """
    logger = logging.getLogger("router.api.http.protocol")
    logger.addFilter(_is_no_wrong_request)
    return logger


def _is_no_wrong_request(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


def _rate_headers(rates: Mapping[str, Rate]) -> dict[str, str]:
    """Return response headers with a key's limits, what is left of them, and when they reset."""
    headers = {}
    for kind, rate in rates.items():
        word = _RATE_WORDS[kind]
        headers[f"X-RateLimit-Limit-{word.title()}"] = f"{rate.limit:.0f}"
        headers[f"X-RateLimit-Remaining-{word.title()}"] = f"{math.floor(rate.remaining)}"
        headers[f"X-RateLimit-Reset-{word.title()}"] = f"{math.ceil(1000 * rate.reset_s)}ms"
    return headers


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
