"""Limits and counts of a listener's connections; plain values."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of a listener's connections.

    Attributes:
        max_connections: maximum number of open connections.
        max_connections_per_address: maximum number of open connections from one address, which may
            be a proxy's.
        header_timeout_s: time from the start of a connection to its first request's headers, TLS
            included.
        idle_timeout_s: time from a response to the next request's headers.
        stall_timeout_s: a connection is closed if its peer reads nothing for this long while data
            waits.
    """

    max_connections: int = 1024
    max_connections_per_address: int = 512
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    stall_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name):g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """Limits of the connections to a gRPC server.

    Attributes:
        max_connections: maximum number of open connections; further connections are closed at once.
        handshake_timeout_s: time to set up a connection, TLS included.
        idle_timeout_s: a connection without calls is closed after this time; clients reconnect.
        stall_timeout_s: a stream is ended if its client reads nothing for this long.
    """

    max_connections: int = 256
    handshake_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    stall_timeout_s: float = 30.0

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Return these limits as channel arguments of gRPC's core."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.server_handshake_timeout_ms", round(1000 * self.handshake_timeout_s)),
            ("grpc.max_connection_idle_ms", round(1000 * self.idle_timeout_s)),
        ]


@dataclass(slots=True)
class ConnectionCounts:
    """Counts of one listener's connections since the listener was made.

    Attributes:
        open: number of open connections.
        at_work: open connections whose request is being answered.
        accepted: connections that were accepted.
        refused: connections that were closed at once, because there was no room and no idle
            connection to close.
        displaced: idle connections that were closed to make room for others.
        timed_out: connections that were closed because no request came in time.
        stalled: connections that were closed because the peer did not read.
    """

    open: int = 0
    at_work: int = 0
    accepted: int = 0
    refused: int = 0
    displaced: int = 0
    timed_out: int = 0
    stalled: int = 0
