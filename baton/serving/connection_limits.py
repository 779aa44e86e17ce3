"""What connections to a listener may cost, and what became of them; plain values."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of a listener's connections.

    Attributes:
        max_connections: open at once.
        max_connections_per_address: of these from one address; clients behind one proxy share it.
        header_timeout_s: from a connection's beginning to its first request's headers, with what
            TLS needs.
        idle_timeout_s: from a response to the next request's headers.
        stall_timeout_s: a peer that takes nothing for so long while something waits is cut off.
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
        max_connections: open at once; more are closed as they come.
        handshake_timeout_s: for a connection to come up, with what TLS needs.
        idle_timeout_s: one without a call is closed; clients connect again by themselves.
        stall_timeout_s: a stream whose client takes nothing of it for so long is ended.
    """

    max_connections: int = 256
    handshake_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    stall_timeout_s: float = 30.0

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Return these limits as options of gRPC's core."""
        return [
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.server_handshake_timeout_ms", round(1000 * self.handshake_timeout_s)),
            ("grpc.max_connection_idle_ms", round(1000 * self.idle_timeout_s)),
        ]


@dataclass(slots=True)
class ConnectionCounts:
    """Counts of one listener's connections since it was made.

    Attributes:
        open: now.
        at_work: of these.
        accepted, refused: refused: there was no room, and nobody to make it.
        displaced: made way for another one.
        timed_out: sent no request in time.
        stalled: took nothing.
    """

    open: int = 0
    at_work: int = 0
    accepted: int = 0
    refused: int = 0
    displaced: int = 0
    timed_out: int = 0
    stalled: int = 0
