"""`baton admin weights`: give running nodes other weights, and let nodes sleep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.admin.connection import (
    AdminConnection,
    AdminError,
    BaseModelOption,
    ExitCode,
    OutputFormat,
    OutputOption,
    complete_node,
    connection,
)
from baton.cli.admin.output import escape, is_json, make_console, make_table, print_json
from baton.cli.command_line import CommandLine
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from baton.v1 import admin_pb2

_POLL_S = 0.2
_BUSY = ("loading", "changing", "waking")
# Errors of calls to a node that left and will come back with new weights
_AWAY = (ExitCode.NOT_FOUND, ExitCode.ERROR)

NodesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Names or engine ids; by default all nodes.", autocompletion=complete_node),
]
NodesOption = Annotated[
    list[str] | None,
    typer.Option("--node", help="Only this node; repeat it for several. By default all nodes."),
]
WhenOption = Annotated[
    str,
    typer.Option(
        help="What becomes of requests that are open on a node that changes. drain: they end with "
        "the old weights. abort: the router tries them again elsewhere, or they fail."
    ),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0, help="Give up after this many seconds (exit code 4).")
]

weights = CommandLine(
    no_args_is_help=True,
    add_completion=False,
    help="Serve other weights of the same model from running nodes, or let nodes sleep. Nodes of "
    "different versions never form a pair.",
)


@weights.command("list")
def list_weights(
    nodes: NodesArgument = None,
    *,
    base_model: BaseModelOption = "",
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the version of each node's weights, and what the node does about them."""
    with connection(access) as admin:
        names = [one.node_name for one in _choose(admin, nodes or [], base_model)]
        found = [_ask(admin, name, "DESCRIBE") for name in names]
    _show(found, output)


@weights.command("update")
def update(
    source: Annotated[
        str,
        typer.Argument(
            help="The weights, on each node: a folder, a safetensors file or a GGUF file below its "
            "--weights-root."
        ),
    ],
    *,
    node: NodesOption = None,
    base_model: BaseModelOption = "",
    when: WhenOption = "drain",
    timeout: TimeoutOption = 600.0,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Load weights on all nodes, and then let one node after the other use them.

    Nothing changes unless every node has loaded and checked the same weights. The last prefill node
    and the last decode node change together, so that no version has nodes of only one role for
    long.
    """
    deadline = time.monotonic() + timeout
    with connection(access) as admin:
        chosen = _choose(admin, node or [], base_model)
        names = [one.node_name for one in chosen]
        try:
            for name in names:
                _ask(admin, name, "LOAD", source=source)
            loaded = [_wait(admin, name, deadline) for name in names]
            _check_loaded(loaded)
        except BaseException:
            _drop(admin, names)
            raise
        digest = loaded[0].weights.loaded
        for together in _turns(chosen):
            for name in together:
                _begin_use(admin, name, when)
            for name in together:
                found = _wait(admin, name, deadline)
                if found.weights.digest != digest:
                    raise AdminError(f"{name}: {found.weights.problem or 'has other weights'}")
        found_all = [_ask(admin, name, "DESCRIBE") for name in names]
    _show(found_all, output)


@weights.command("sleep")
def sleep(
    nodes: NodesArgument = None,
    *,
    base_model: BaseModelOption = "",
    level: Annotated[
        str,
        typer.Option(
            help="dropped: the weights are read from their files again. host: they are kept in "
            "host memory."
        ),
    ] = "dropped",
    when: WhenOption = "drain",
    timeout: TimeoutOption = 600.0,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let nodes give back the memory of their weights until they wake; they stay drained."""
    _change(access, nodes, base_model, timeout, output, "SLEEP", level=level, when=when)


@weights.command("wake")
def wake(
    nodes: NodesArgument = None,
    *,
    base_model: BaseModelOption = "",
    timeout: TimeoutOption = 600.0,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """End the sleep of nodes, with the weights that they had."""
    _change(access, nodes, base_model, timeout, output, "WAKE")


@weights.command("drop")
def drop(
    nodes: NodesArgument = None,
    *,
    base_model: BaseModelOption = "",
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Forget loaded weights, or give up a change while a node still drains.

    Forgets new weights that a node has loaded but does not use yet; weights in use stay.
    """
    _change(access, nodes, base_model, 60.0, output, "DROP")


def _change(
    access: OperatorAccess,
    nodes: Sequence[str] | None,
    base_model: str,
    timeout_s: float,
    output: OutputFormat,
    action: str,
    **fields: str,
) -> None:
    """Start a change on several nodes at the same time, and wait until all nodes have ended it."""
    deadline = time.monotonic() + timeout_s
    with connection(access) as admin:
        names = [one.node_name for one in _choose(admin, nodes or [], base_model)]
        for name in names:
            _ask(admin, name, action, **fields)
        found = [_wait(admin, name, deadline) for name in names]
    _show(found, output)
    for one in found:
        if one.weights.problem:
            raise AdminError(f"{one.node_name}: {one.weights.problem}")


def _choose(
    admin: AdminConnection, names: Sequence[str], base_model: str
) -> list[admin_pb2.NodeDescription]:
    """Return the nodes with these names, or all of a base model; raises AdminError if none."""
    from baton.v1 import types_pb2

    if names:
        return [admin.node(name) for name in names]
    # Encode nodes cannot change their weights; they are restarted instead.
    encode = types_pb2.NodeRole.NODE_ROLE_ENCODE
    joined = [one for one in admin.nodes() if not one.lost and one.role != encode]
    if base_model:
        joined = [one for one in joined if one.model == base_model]
    if not joined:
        raise AdminError("no node has joined", ExitCode.NOT_FOUND)
    return joined


def _ask(admin: AdminConnection, name: str, action: str, **fields: Any) -> admin_pb2.NodeWeights:
    from baton.v1 import admin_pb2

    request = admin_pb2.WeightsRequest(action=f"WEIGHTS_ACTION_{action}", **fields)
    found: admin_pb2.NodeWeights = admin.call("ChangeWeights", node=name, request=request)
    return found


def _begin_use(admin: AdminConnection, name: str, when: str) -> None:
    """Let a node use the loaded weights.

    The node's answer may be lost, because the node leaves the router during the change.
    """
    try:
        _ask(admin, name, "USE", when=when)
    except AdminError as error:
        if error.exit_code not in _AWAY:
            raise


def _wait(admin: AdminConnection, name: str, deadline: float) -> admin_pb2.NodeWeights:
    """Wait until a node's change has ended; raises AdminError if time is up."""
    while True:
        problem = "it is not there"
        try:
            found = _ask(admin, name, "DESCRIBE")
        except AdminError as error:
            if error.exit_code not in _AWAY:
                raise
            problem = str(error)
        else:
            if found.weights.state not in _BUSY:
                return found
            problem = f"it is {found.weights.state}"
        if time.monotonic() > deadline:
            raise AdminError(f"{name}: not done in time: {problem}", ExitCode.TIMEOUT)
        time.sleep(_POLL_S)


def _check_loaded(loaded: Sequence[admin_pb2.NodeWeights]) -> None:
    """Raise AdminError unless all nodes have loaded the same weights."""
    for one in loaded:
        if one.weights.problem:
            raise AdminError(f"{one.node_name}: {one.weights.problem}", ExitCode.USAGE)
    versions = {one.weights.loaded for one in loaded}
    if len(versions) > 1:
        shown = ", ".join(f"{one.node_name} {one.weights.loaded}" for one in loaded)
        raise AdminError(f"weights: the nodes have different files: {shown}", ExitCode.USAGE)


def _drop(admin: AdminConnection, names: Sequence[str]) -> None:
    """Let all nodes that can be reached drop the weights that they loaded but do not use."""
    for name in names:
        try:
            _ask(admin, name, "DROP")
        except AdminError:
            continue  # the node cannot be reached, or has loaded nothing


def _turns(nodes: Sequence[admin_pb2.NodeDescription]) -> list[list[str]]:
    """Return groups of nodes to change one after the other.

    The last group has the last node of each role; the groups before have one node each.
    """
    from baton.v1 import types_pb2

    prefill, decode = list[str](), list[str]()
    for one in nodes:
        is_decode = one.role == types_pb2.NodeRole.NODE_ROLE_DECODE
        (decode if is_decode else prefill).append(one.node_name)
    by_turns = zip_longest(prefill[:-1], decode[:-1])
    alone = [[name] for pair in by_turns for name in pair if name is not None]
    return [*alone, prefill[-1:] + decode[-1:]]


def _show(found: Sequence[admin_pb2.NodeWeights], output: OutputFormat) -> None:
    if is_json(output):
        for one in found:
            print_json(one)
        return
    table = make_table("node", "weights", "state", "new", "problem", whole=("node", "problem"))
    for one in found:
        of = one.weights
        table.add_row(escape(one.node_name), of.digest, of.state, of.loaded, escape(of.problem))
    make_console().print(table)
