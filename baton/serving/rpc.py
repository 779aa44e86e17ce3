"""gRPC servers and channels, set up alike in all programs.

Only `CallGate` calls `context.abort`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from baton.access.exposure import split_address
from baton.access.tls import (
    ServerContext,
    TlsFiles,
    TlsMaterial,
    channel_credentials,
    server_credentials,
)
from baton.api.errors import ConfigError
from baton.serving.call_gate import CallGate
from baton.serving.connection_limits import RpcLimits
from baton.serving.http2.frames import FrameLimits
from baton.serving.http2.rpc_front import RpcFront
from baton.serving.unknown_methods import make_server

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
# A client's message must be shorter than a node's message, because text becomes token ids, which
# take more bytes.
MAX_CLIENT_MESSAGE_BYTES = 8 * 2**20
MAX_STREAMS = 2048  # maximum number of concurrent calls per connection
# Maximum number of concurrent calls per connection for servers with few callers. A call takes 25 to
# 40 KiB while its answer is unread.
FEW_STREAMS = 64
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A machine that fails does not close its connections, so pings check connections with open
    # calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
# The library supports v1alpha only.
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_IDENTITY_ONLY = 1  # bit of "no compression" in gRPC's set of allowed algorithms
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_CLIENT_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2000),
    ("grpc.http2.max_ping_strikes", 0),
    # Maximum number of calls that wait to be accepted. gRPC ends further calls as CANCELLED without
    # a reason.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Compression is off: a few compressed kilobytes could become megabytes, and many messages
    # gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    # gRPC's soft and hard limit of header bytes both equal the limit of `FrameGuard`. If they
    # differed, gRPC would refuse calls with sizes between them at random.
    ("grpc.max_metadata_size", FrameLimits().max_header_bytes),
    ("grpc.absolute_max_metadata_size", FrameLimits().max_header_bytes),
]


Metadata: TypeAlias = tuple[tuple[str, str], ...]


def _add_reflection(servicer: Any, server: grpc.aio.Server) -> None:
    """Serve reflection as v1alpha and as v1, which differ only in the services' names."""
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))
    server.add_registered_method_handlers(REFLECTION_V1, methods)  # type: ignore[attr-defined]


def bearer(token: str) -> Metadata:
    """Return the metadata that sends a bearer token; empty if the token is empty."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class RpcServer:
    """A gRPC server with health checking and reflection.

    Args:
        services: full names of the services that `register` adds, for reflection.
        register: adds the servicers to the server.
        gate: guards all calls; None: anybody on this machine may call.
        reuse_port: whether other processes may serve on the same port and share its connections.
            Otherwise a second server on the port fails to start.
        limits: limits of connections.
        tls: the server's certificates; None: no TLS.
        require_client_certs: whether clients need a certificate from a CA in ``tls``; otherwise the
            server asks clients for no certificate.
        max_streams: maximum number of concurrent calls per connection.
    """

    def __init__(
        self,
        services: Sequence[ServiceDescriptor],
        register: Callable[[grpc.aio.Server], None],
        gate: CallGate | None = None,
        *,
        reuse_port: bool = False,
        limits: RpcLimits | None = None,
        tls: TlsFiles | None = None,
        require_client_certs: bool = False,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        limits = limits or RpcLimits()
        self._credentials: grpc.ServerCredentials | None = None
        self._front: RpcFront | None = None
        if tls is not None and require_client_certs:
            # `RpcFront` is not needed, because unknown clients fail at the TLS handshake.
            self._credentials = server_credentials(tls, require_client_certs=True)
        else:
            self._front = RpcFront(limits, None if tls is None else ServerContext.for_grpc(tls))
        self._reuse_port = reuse_port
        options = [
            *_SERVER_OPTIONS,
            *limits.channel_arguments(),
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.so_reuseport", int(reuse_port)),
        ]
        gate = (gate or CallGate()).with_stall_timeout(limits.stall_timeout_s)
        self._server = make_server(gate, gate.refuse_unknown, options)
        register(self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # lazy there
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._service_names = [service.full_name for service in services]
        names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # lazy there
        _add_reflection(servicer, self._server)

    async def start(self, listen: str) -> str:
        """Listen on ``host:port`` (port 0: any free one) and return the address with its port.

        Raises ConfigError if the address is malformed or in use.
        """
        if self._front is not None:
            return await self._start_behind(self._front, listen)
        assert self._credentials is not None
        host, port = split_address("listen", listen)
        try:
            bound = self._server.add_secure_port(listen, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"listen: cannot listen on {listen}; is the port in use by another program?"
            ) from error
        if bound == 0 or (port not in (0, bound)):
            raise ConfigError(f"listen: cannot listen on {listen}")
        await self._server.start()
        return f"{host}:{bound}"

    async def _start_behind(self, front: RpcFront, listen: str) -> str:
        self._server.add_insecure_port(front.private_address)
        await self._server.start()
        try:
            return await front.start(listen, reuse_port=self._reuse_port)
        except ConfigError:
            await self.stop(0)
            raise

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks with SERVING or NOT_SERVING, for each service and for the server."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls; running calls have ``grace_s`` seconds to end."""
        await self._health.enter_graceful_shutdown()
        if self._front is not None:
            self._front.stop_accepting()
        await self._server.stop(grace_s)
        if self._front is not None:
            await self._front.close()


def open_channel(
    address: str, tls: TlsMaterial | None = None, *, server_name: str = ""
) -> grpc.aio.Channel:
    """Open an asyncio channel with Baton's limits.

    Args:
        tls: certificates; None: no TLS.
        server_name: name that the server's certificate must have; empty: the address's host.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(
        address, channel_credentials(tls), options=_tls_options(server_name)
    )


def open_sync_channel(
    address: str, tls: TlsMaterial | None = None, *, server_name: str = ""
) -> grpc.Channel:
    """Open a blocking channel with Baton's limits.

    Args:
        server_name: name that the server's certificate must have; empty: the address's host.
    """
    if tls is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, channel_credentials(tls), options=_tls_options(server_name))


def _tls_options(server_name: str = "") -> list[tuple[str, Any]]:
    named = [("grpc.ssl_target_name_override", server_name.strip("[]"))] if server_name else []
    # Do not share connections: a channel with new certificates might reuse an old connection.
    return [*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), *named]
