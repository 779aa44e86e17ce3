"""gRPC set-up that every program shares: servers, channels, and errors to status codes.

Takes our exceptions, gives status codes; nobody else calls `context.abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.error_details import details_trailer, receipt_trailer
from baton.errors import BatonError, ConfigError, RequestCancelledError, status_name
from baton.exposure import split_address
from baton.tls import TlsFiles, TlsMaterial, channel_credentials, server_credentials

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
# What a client sends grows on its way to a node: text becomes token ids, and more.
MAX_CLIENT_MESSAGE_BYTES = 8 * 2**20
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A machine that vanished closes nothing: ask whether it is there while a call is open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_IDENTITY_ONLY = 1  # in gRPC's set of compression algorithms
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_CLIENT_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2000),
    ("grpc.http2.max_ping_strikes", 0),
    # Calls that wait to be taken; more of them are dropped as CANCELLED, which says nothing.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # A message of a few kilobytes would become megabytes, and many of them gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    ("grpc.max_concurrent_streams", 4096),
]


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """What connections to a server may cost.

    Attributes:
        max_connections: open at once; more are closed as they come.
        handshake_timeout_s: for a connection to come up, with what TLS needs.
        idle_timeout_s: one without a call is closed; clients connect again by themselves.
        stall_timeout_s: a stream whose client takes nothing of it for so long is ended.
    """

    max_connections: int = 256
    handshake_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    stall_timeout_s: float = 30.0

    def channel_arguments(self) -> list[tuple[str, int]]:
        """These limits as gRPC's core takes them."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.server_handshake_timeout_ms", round(1000 * self.handshake_timeout_s)),
            ("grpc.max_connection_idle_ms", round(1000 * self.idle_timeout_s)),
        ]


def status_of(error: BatonError) -> grpc.StatusCode:
    """The status code of one of our errors; the nearest class in the table counts."""
    return grpc.StatusCode[status_name(error)]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Turns what a handler raises into a status: ours by the table, all else into INTERNAL.

    Ends streams whose client takes nothing of them for ``stall_timeout_s``, too.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.unary_unary:
            wrapped = _guard_unary(handler.unary_unary)
            make = grpc.unary_unary_rpc_method_handler
        elif handler.unary_stream:
            wrapped = _guard_stream(handler.unary_stream, self._stall_timeout_s)
            make = grpc.unary_stream_rpc_method_handler
        elif handler.stream_stream:
            wrapped = _guard_stream(handler.stream_stream, self._stall_timeout_s)
            make = grpc.stream_stream_rpc_method_handler
        else:
            return handler
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


def _guard_unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(context, error)

    return guarded


def _guard_stream(behavior: Callable[..., Any], stall_timeout_s: float) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        watch = _StallWatch(context, stall_timeout_s)
        try:
            async with contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    if not watch.num_sent:  # with the first message, no status could be sent
                        await context.send_initial_metadata(())  # while that is not taken
                    watch.is_sending = True
                    yield response  # back when the client's side of the connection has taken it
                    watch.is_sending = False
                    watch.num_sent += 1
        except grpc.aio.BaseError:  # gRPC's own, such as a client that is gone
            raise
        except Exception as error:
            await _abort(context, error)
        finally:
            watch.close()

    # Services of other libraries (reflection, health) are plain coroutines or generators of theirs;
    # what is not one of our async generators passes through untouched.
    return guarded if inspect.isasyncgenfunction(behavior) else behavior


class _StallWatch:
    """Ends a call, within half as long again, when its client takes no message for so long.

    Attributes:
        is_sending: whether a message waits for the client.
        num_sent: messages that it took.
    """

    def __init__(self, context: Context, timeout_s: float) -> None:
        self.is_sending = False
        self.num_sent = 0
        self._context = context
        self._timeout_s = timeout_s
        self._task = asyncio.current_task()
        self._num_looks = 0
        self._num_seen = -1
        self._last_words: asyncio.Task[None] | None = None
        self._timer = self._look_later()

    def close(self) -> None:
        """The call is over."""
        self._timer.cancel()

    def _look_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._timeout_s / 2, self._look)

    def _look(self) -> None:
        if not self.is_sending or self.num_sent != self._num_seen:
            self._num_looks, self._num_seen = 0, self.num_sent if self.is_sending else -1
        else:
            self._num_looks += 1
        self._timer = self._look_later()
        if self._num_looks == 2:
            self._cut_off()

    def _cut_off(self) -> None:
        self.close()
        problem = f"the client took nothing for {self._timeout_s:g} s"
        logger.info("ended a call of %s: %s", self._context.peer(), problem)
        assert self._task is not None
        self._last_words = asyncio.create_task(self._say(problem))
        self._task.cancel()  # it waits for the client, where no exception of ours would reach it

    async def _say(self, problem: str) -> None:
        """Tell the client, should it ever read on, behind what it was sent before."""
        with contextlib.suppress(grpc.aio.BaseError):
            await _abort(self._context, RequestCancelledError(problem))


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, BatonError):
        status, message = status_of(error), str(error)
        trailers = [details_trailer(status.value[0], message, error)]
        if error.receipt is not None:
            trailers.append(receipt_trailer(error.receipt))
        await context.abort(status, message, tuple(trailers))
    logger.error("unexpected error in a call", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def has_token(context: Context, token: str) -> bool:
    """Whether a call brings ``authorization: Bearer <token>``; takes as long for any wrong one."""
    return bears_token(context.invocation_metadata(), token)


def bears_token(metadata: Iterable[tuple[str, str | bytes]] | None, token: str) -> bool:
    """The same, of a call's metadata."""
    return hmac.compare_digest(_authorization(metadata).encode(), f"Bearer {token}".encode())


def authorization_of(context: Context) -> str:
    """What a call shows of who makes it; empty when it shows nothing."""
    return _authorization(context.invocation_metadata())


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    return str(dict(metadata or ()).get("authorization", ""))


def bearer(token: str) -> Metadata:
    """Metadata that `has_token` and `authorization_of` look at; none for an empty token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class RpcServer:
    """A gRPC server with health checking and reflection.

    Args:
        services: full names of the services that `register` adds, for reflection.
        register: adds the servicers to the server.
        interceptors: see each call before its handler does.
        reuse_port: whether other processes may serve on the same port, each a part of the
            connections. Without it a second server on the port does not start.
        limits: of connections.
        tls: what the server shows; None: no TLS.
        require_client_certs: whether only those are served that show a certificate of a CA in
            ``tls``; else nobody is asked for one.
    """

    def __init__(
        self,
        services: Sequence[ServiceDescriptor],
        register: Callable[[grpc.aio.Server], None],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # generic in stubs only
        *,
        reuse_port: bool = False,
        limits: RpcLimits | None = None,
        tls: TlsFiles | None = None,
        require_client_certs: bool = False,
    ) -> None:
        self._credentials = (
            None
            if tls is None
            else server_credentials(tls, require_client_certs=require_client_certs)
        )
        limits = limits or RpcLimits()
        options = [
            *_SERVER_OPTIONS,
            *limits.channel_arguments(),
            ("grpc.so_reuseport", int(reuse_port)),
        ]
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(limits.stall_timeout_s), *interceptors], options=options
        )
        register(self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # lazy there
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._service_names = [service.full_name for service in services]
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, listen: str) -> str:
        """Listen on ``host:port`` (port 0: any free one) and return the address with its port.

        Raises ConfigError when the address is malformed or in use.
        """
        host, port = split_address("listen", listen)
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(listen)
            else:
                bound = self._server.add_secure_port(listen, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"listen: cannot listen on {listen}; is the port in use by another program?"
            ) from error
        if bound == 0 or (port not in (0, bound)):
            raise ConfigError(f"listen: cannot listen on {listen}")
        await self._server.start()
        return f"{host}:{bound}"

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks with SERVING or NOT_SERVING, for each service and overall."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls; those in progress have ``grace_s`` to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def open_channel(
    address: str, tls: TlsMaterial | None = None, *, server_name: str = ""
) -> grpc.aio.Channel:
    """An asyncio channel with our limits.

    Args:
        tls: None: no TLS.
        server_name: that the server's certificate must have; empty: the address's host.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(
        address, channel_credentials(tls), options=_tls_options(server_name)
    )


def open_sync_channel(address: str, tls: TlsMaterial | None = None) -> grpc.Channel:
    """A blocking channel with our limits; without TLS if there is none."""
    if tls is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, channel_credentials(tls), options=_tls_options())


def _tls_options(server_name: str = "") -> list[tuple[str, Any]]:
    named = [("grpc.ssl_target_name_override", server_name.strip("[]"))] if server_name else []
    # Else a channel of new certificates could go on with a connection of the old ones.
    return [*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), *named]
