"""gRPC set-up that every program shares: servers, channels, and their limits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.call_gate import CallGate
from baton.errors import ConfigError

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
]


Metadata: TypeAlias = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    """Metadata that says who calls; none for an empty token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class RpcServer:
    """A gRPC server with health checking and reflection.

    Args:
        services: full names of the services that `register` adds, for reflection.
        register: adds the servicers to the server.
        gate: guards all calls; without one, anybody of this machine may make them.
        reuse_port: whether other processes may serve on the same port, each a part of the
            connections. Without it a second server on the port does not start.
    """

    def __init__(
        self,
        services: Sequence[ServiceDescriptor],
        register: Callable[[grpc.aio.Server], None],
        gate: CallGate | None = None,
        *,
        reuse_port: bool = False,
    ) -> None:
        options = [*_SERVER_OPTIONS, ("grpc.so_reuseport", int(reuse_port))]
        self._server = grpc.aio.server(interceptors=[gate or CallGate()], options=options)
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
            bound = self._server.add_insecure_port(listen)
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


def split_address(option: str, address: str) -> tuple[str, int]:
    """``host:port`` in its parts; raises ConfigError that names the option."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option}: must be host:port, got {address!r}")
    return host, int(port)


def is_public(option: str, address: str) -> bool:
    """Whether other machines can reach an address; raises ConfigError that names the option."""
    host, _ = split_address(option, address)
    return host not in ("localhost", "[::1]") and not host.startswith("127.")


def warn_if_public(address: str, *, authenticated: bool = False) -> None:
    """Log a warning when others than this machine can call, and in what it is not protected."""
    if is_public("listen", address):
        missing = "TLS" if authenticated else "authentication or TLS"
        logger.warning("%s can be reached from other machines, without %s", address, missing)


def open_channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel with our limits."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def open_sync_channel(address: str) -> grpc.Channel:
    """A blocking channel with our limits."""
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
