"""`baton admin drain`, `resume` and `remove`: take nodes out of service and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.admin.connection import (
    AdminConnection,
    AdminError,
    ExitCode,
    NodeArgument,
    OutputFormat,
    OutputOption,
    connection,
)
from baton.cli.admin.nodes import state_of
from baton.cli.admin.output import is_json, show
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from rich.text import Text

    from baton.v1.admin_pb2 import NodeDescription as _Node

_POLL_S = 0.1

WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until it is done.")]
TimeoutOption = Annotated[
    float, typer.Option(help="With --wait: give up after this time, seconds; exit code 4.", min=0)
]


def drain(
    name: NodeArgument,
    wait: WaitOption = False,
    timeout_s: TimeoutOption = 300.0,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let a node finish its requests and take no new ones; the node stays, for `resume` or
    `remove`.

    With --wait, returns when the node has no requests, no transfers, and no blocks that a peer may
    still write.
    """
    with connection(access) as admin:
        found = admin.call("Drain", node=name)
        if wait:
            found = _wait(admin, found, "drained", timeout_s, quiet=is_json(output))
    _print(found, output, f"{found.node_name} is {'drained' if wait else 'told to drain'}")


def resume(
    name: NodeArgument,
    wait: WaitOption = False,
    timeout_s: TimeoutOption = 10.0,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have a draining or drained node serve again."""
    with connection(access) as admin:
        found = admin.call("Resume", node=name)
        if wait:
            found = _wait(admin, found, "serving", timeout_s, quiet=is_json(output))
    _print(found, output, f"{found.node_name} {'serves' if wait else 'is told to serve'} again")


def remove(
    name: NodeArgument,
    force: Annotated[
        bool,
        typer.Option("--force", help="Remove it at once; other nodes retry its requests."),
    ] = False,
    wait: WaitOption = False,
    timeout_s: TimeoutOption = 300.0,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Drain a node and end its process.

    --force removes a node that does not react: the node leaves at once, and can join again only
    after a restart of its process.
    """
    with connection(access) as admin:
        found = admin.call("Remove", node=name, force=force)
        if wait and not force:
            _wait(admin, found, "", timeout_s, quiet=is_json(output))
    is_gone = wait or force
    _print(found, output, f"{found.node_name} is {'removed' if is_gone else 'told to leave'}")


def _wait(
    admin: AdminConnection, found: _Node, wanted: str, timeout_s: float, *, quiet: bool
) -> _Node:
    """Wait until a node has a state, and show what is left to do; raises AdminError.

    Args:
        wanted: name of the state; empty: wait until the node has left.
    """
    from rich.console import Console
    from rich.live import Live

    give_up_at = time.monotonic() + timeout_s
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        return _poll(admin, found, wanted, give_up_at, lambda node: None)
    with Live(console=console, transient=True) as live:
        return _poll(admin, found, wanted, give_up_at, lambda node: live.update(_left(node)))


def _poll(
    admin: AdminConnection,
    found: _Node,
    wanted: str,
    give_up_at: float,
    show: Callable[[_Node], None],
) -> _Node:
    # Engine ids are compared, because a restarted node is another node of the same name.
    while not _has_reached(found, wanted):
        show(found)
        if time.monotonic() > give_up_at:
            raise AdminError(
                f"{found.node_name} is still {state_of(found)} after --timeout-s: {_left(found)}",
                ExitCode.TIMEOUT,
            )
        time.sleep(_POLL_S)
        try:
            found = admin.node(found.engine_id)
        except AdminError as error:
            if error.exit_code is not ExitCode.NOT_FOUND:
                raise
            if wanted:
                raise AdminError(f"{found.node_name} left the router", ExitCode.NOT_FOUND) from None
            return found
    return found


def _has_reached(found: _Node, wanted: str) -> bool:
    if wanted == "serving":  # states such as warming up count as serving
        return state_of(found) not in ("draining", "drained", "lost")
    return state_of(found) == wanted


def _left(found: _Node) -> Text:
    from rich.text import Text

    beat = found.beat
    num_open = beat.num_waiting + beat.num_waiting_for_remote_kvs + beat.num_running
    return Text(
        f"{found.node_name} is {state_of(found)}: {num_open} requests, "
        f"{beat.num_transfers} transfers, {beat.num_quarantined_blocks} blocks in quarantine left"
    )


def _print(found: _Node, output: OutputFormat, text: str) -> None:
    show(found, output, lambda _: typer.echo(text))
