"""Options, router connection and exit codes that all admin commands share.

Modules that connect are imported late, because `--help` must be fast.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.api.errors import ConfigError, InvalidRequestError, NotFoundError
from baton.cli.errors import CommandError
from baton.cli.router_access import OperatorAccess
from baton.options import make, options_of

if TYPE_CHECKING:
    import grpc

    from baton.v1 import admin_pb2

TIMEOUT_S = 15.0  # longer than the router's 10 s timeout for nodes
_COMPLETION_TIMEOUT_S = 1.0


class ExitCode(enum.IntEnum):
    """Exit codes of `baton admin` commands, for scripts."""

    OK = 0
    ERROR = 1  # the router or a node is unreachable or refuses
    USAGE = 2  # invalid options, or a value that the router refuses
    NOT_FOUND = 3  # no such node or request
    TIMEOUT = 4  # an awaited state was not reached
    ORPHANS = 5  # the audit found blocks with more or fewer owners than references


class OutputFormat(enum.Enum):
    """Formats in which commands print their results."""

    TABLE = "table"
    JSON = "json"


TenantOption = Annotated[
    str,
    typer.Option(
        help="Tenant of the request, if several tenants have one with this id; for a prompt: the "
        "tenant to assume."
    ),
]
BaseModelOption = Annotated[
    str,
    typer.Option(
        help="A base model as given to the router's --model, or a name of it, where there are "
        "several."
    ),
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option(help="Format of the output: for people (table) or for programs (json)."),
]


class AdminConnection:
    """A connection to one router's `Admin` service.

    Args:
        access: address and credentials of the router.
        channel: channel to the router.
    """

    def __init__(self, access: OperatorAccess, channel: grpc.Channel) -> None:
        from baton.serving.rpc import bearer
        from baton.v1 import admin_pb2_grpc

        self._access = access
        self._metadata = bearer(access.token)
        self._stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated

    def call(self, method: str, *, timeout_s: float = TIMEOUT_S, **fields: Any) -> Any:
        """Call a method with a request message of the given fields; raises AdminError."""
        import grpc
        from google.protobuf.message_factory import GetMessageClass

        from baton.v1 import admin_pb2

        of_service = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name
        request = GetMessageClass(of_service[method].input_type)(**fields)
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise AdminError.of(error, self._access) from None

    def nodes(self) -> list[admin_pb2.NodeDescription]:
        """Return all nodes that the router knows."""
        response: admin_pb2.ListNodesResponse = self.call("ListNodes")
        return list(response.nodes)

    def node(self, name: str) -> admin_pb2.NodeDescription:
        """Return the router's description of one node."""
        found: admin_pb2.NodeDescription = self.call("GetNode", node=name)
        return found


class AdminError(CommandError):
    """A command of an operator failed; the exit code is an `ExitCode`."""

    @classmethod
    def of(cls, error: grpc.RpcError, access: OperatorAccess) -> AdminError:
        """Return the error for a failed call."""
        import grpc

        from baton.access.tls_refusal import why_refused
        from baton.client.messages import trailers_of
        from baton.serving.error_details import error_from_trailers

        router = access.router
        code, details = error.code(), error.details() or ""
        ours = error_from_trailers(details, trailers_of(error))
        if isinstance(ours, NotFoundError):
            return cls(details, ExitCode.NOT_FOUND)
        if isinstance(ours, InvalidRequestError):
            return cls(details, ExitCode.USAGE)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return cls(f"router: {router} is of another version and cannot do this")
        if ours is None and code in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ):
            is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            why = why_refused(router, access.tls) or (code.name if is_late else "is it up?")
            return cls(f"router: {router} cannot be reached ({why})")
        return cls(details or code.name)


@contextmanager
def connection(access: OperatorAccess) -> Iterator[AdminConnection]:
    """Connect to a router within a context, in which failed calls raise AdminError."""
    from baton.access.tls import read_tls
    from baton.serving.rpc import open_sync_channel

    try:
        with open_sync_channel(access.router, read_tls(access.tls)) as channel:
            yield AdminConnection(access, channel)
    except ConfigError as error:
        raise AdminError(str(error), ExitCode.USAGE) from None
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(130) from None


def ask(access: OperatorAccess, method: str, **fields: Any) -> Any:
    """Connect to a router for a single call of a method; raises AdminError."""
    with connection(access) as admin:
        return admin.call(method, **fields)


def connections(access: OperatorAccess) -> Iterator[tuple[str, AdminConnection]]:
    """Yield connections to all routers that the address resolves to, one after another.

    A host name with several addresses means several routers. Nodes join all of these routers, but
    an operator's call reaches only one of them. Raises AdminError.
    """
    import asyncio

    from baton.access.exposure import split_address
    from baton.access.tls import read_tls
    from baton.link.router_links import resolve_routers
    from baton.serving.rpc import open_sync_channel

    try:
        split_address("router", access.router)
        addresses = asyncio.run(resolve_routers([access.router])) or {access.router: ""}
        tls = read_tls(access.tls)
    except ConfigError as error:
        raise AdminError(str(error), ExitCode.USAGE) from None
    for address, host in addresses.items():
        here = dataclasses.replace(access, router=address)
        with open_sync_channel(address, tls, server_name=host) as channel:
            yield address, AdminConnection(here, channel)


def complete_node(context: typer.Context, incomplete: str) -> list[str]:
    """Ask the router for names of nodes with this prefix; empty if the router does not answer."""
    from baton.access.tls import read_tls
    from baton.serving.rpc import open_sync_channel

    known = {one.name for one in options_of(OperatorAccess)}
    given = {name: value for name, value in context.params.items() if value and name in known}
    try:
        access = make(OperatorAccess, given)
        with open_sync_channel(access.router, read_tls(access.tls)) as channel:
            response: admin_pb2.ListNodesResponse = AdminConnection(access, channel).call(
                "ListNodes", timeout_s=_COMPLETION_TIMEOUT_S
            )
    except (AdminError, ConfigError):
        return []
    return [node.node_name for node in response.nodes if node.node_name.startswith(incomplete)]


def complete_server(context: typer.Context, incomplete: str) -> list[str]:
    """Return ``router`` and the names of nodes that begin with this prefix."""
    return [*(["router"] if "router".startswith(incomplete) else []),
            *complete_node(context, incomplete)]  # fmt: skip


NodeArgument = Annotated[
    str, typer.Argument(help="Name or engine id of a node.", autocompletion=complete_node)
]
OptionalNodeArgument = Annotated[
    str, typer.Argument(help="Name or engine id of a node.", autocompletion=complete_node)
]
ServerArgument = Annotated[
    str,
    typer.Argument(
        help="Name or engine id of a node, or `router`.", autocompletion=complete_server
    ),
]
