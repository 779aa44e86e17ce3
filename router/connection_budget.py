"""Divides the router's file descriptors among its APIs, so that no API can use up all of them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError
from baton.options import check_limits, option
from baton.serving.connection_limits import ConnectionLimits, RpcLimits

# Number of descriptors left for files, logs, pipes of threads, and the router's outgoing
# connections.
_NUM_OWN = 64
# Share of the descriptors for clients. It is smaller than the share at which the router counts as
# overloaded, because idle connections are no overload.
_CLIENTS_SHARE = 0.8
_MIN_DESCRIPTORS = 256
_NODES_SHARE = 1 / 4  # share for nodes and operators, if they have an address of their own
# Number of descriptors per gRPC connection: the client's socket, and both ends of an internal
# connection.
_RPC_DESCRIPTORS = 3
_MAX_NODES = 4096
# Without an option, at most this many clients may connect: each takes about 20 KiB of memory.
_MAX_DEFAULT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options that limit clients' connections; see `ConnectionLimits`."""

    max_connections: int = option(
        0,
        least=0,
        help="Most client connections of each API. At this number, connections that wait for a "
        "request are closed for new ones. 0: as many as the limit of descriptors allows, at "
        "most 10,000.",
    )
    max_connections_per_address: int = option(
        0,
        least=0,
        help="Most HTTP connections from one address. All clients behind one proxy share its "
        "address. 0: half of --max-connections.",
    )
    header_timeout_s: float = option(
        10.0,
        above=0,
        help="Time for a new connection's first request to come, TLS included, seconds.",
    )
    idle_timeout_s: float = option(
        75.0, above=0, help="Time after which a connection without a request is closed, seconds."
    )
    stall_timeout_s: float = option(
        30.0,
        above=0,
        help="Time after which a client that reads nothing of its stream is cut off and its "
        "request ended, seconds.",
    )

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBudget:
    """How many connections each of the router's listeners may have.

    Attributes:
        http, public: limits of the HTTP API and of the public gRPC API.
        nodes: limits of the gRPC address for nodes and operators, if it is separate.
    """

    http: ConnectionLimits
    public: RpcLimits
    nodes: RpcLimits


def share_descriptors(
    num_descriptors: int, options: ConnectionOptions, *, own_address_for_nodes: bool
) -> ConnectionBudget:
    """Divide the process's descriptors among the listeners; leave some to the process itself.

    Raises:
        ConfigError: the process has too few descriptors, or the options ask for more.
    """
    if num_descriptors < _MIN_DESCRIPTORS:
        raise ConfigError(
            f"RLIMIT_NOFILE: must allow {_MIN_DESCRIPTORS} descriptors, got {num_descriptors}"
        )
    left = int(num_descriptors * _CLIENTS_SHARE) - _NUM_OWN
    num_nodes = 0
    if own_address_for_nodes:
        num_nodes = min(int(left * _NODES_SHARE) // _RPC_DESCRIPTORS, _MAX_NODES)
    most = (left - _RPC_DESCRIPTORS * num_nodes) // (1 + _RPC_DESCRIPTORS)
    if options.max_connections > most:
        raise ConfigError(
            f"max_connections: must be {most} or less with RLIMIT_NOFILE {num_descriptors}, "
            f"got {options.max_connections}"
        )
    each = options.max_connections or min(most, _MAX_DEFAULT)
    http = ConnectionLimits(
        max_connections=each,
        max_connections_per_address=options.max_connections_per_address or max(each // 2, 1),
        header_timeout_s=options.header_timeout_s,
        idle_timeout_s=options.idle_timeout_s,
        stall_timeout_s=options.stall_timeout_s,
    )
    return ConnectionBudget(
        http=http, public=_rpc_limits(each, options), nodes=_rpc_limits(num_nodes or 1, options)
    )


def _rpc_limits(num_connections: int, options: ConnectionOptions) -> RpcLimits:
    return RpcLimits(
        max_connections=num_connections,
        handshake_timeout_s=options.header_timeout_s,
        idle_timeout_s=options.idle_timeout_s,
        stall_timeout_s=options.stall_timeout_s,
    )
