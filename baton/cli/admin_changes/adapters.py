"""`baton admin adapters`: list, load, name and unload the LoRA adapters of a router's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from baton.adapters.digest import shorten_digest
from baton.cli.admin.connection import (
    AdminError,
    BaseModelOption,
    ExitCode,
    OutputFormat,
    OutputOption,
    ask,
)
from baton.cli.admin.output import escape, is_json, make_console, make_table, print_json, show
from baton.cli.command_line import CommandLine
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from baton.v1 import admin_pb2

_LOAD_TIMEOUT_S = 70.0  # seconds in which nodes read the adapter's files
_UNLOAD_TIMEOUT_S = 20.0  # seconds in which requests that use the adapter end

NameArgument = Annotated[str, typer.Argument(help="See `baton admin adapters list`.")]

adapters = CommandLine(
    no_args_is_help=True,
    add_completion=False,
    help="See or change the LoRA adapters that nodes compute beside the base model. A switch is "
    "atomic: running requests end on the adapter that they began with.",
)


@adapters.command("list")
def list_adapters(access: OperatorAccess, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the adapters that have names or are in a node's memory."""
    found: admin_pb2.AdminListAdaptersResponse = ask(access, "ListAdapters")
    if is_json(output):
        print_json(found)
        return
    sizes = {one.digest: one.num_bytes for node in found.nodes for one in node.adapters.adapters}
    table = make_table(
        "names", "adapter", "source", "MiB", "pinned", "requests", "nodes", whole=("names",)
    )
    for one in found.adapters:
        table.add_row(
            escape(", ".join(one.names)),
            shorten_digest(one.digest),
            escape(one.source),
            f"{sizes[one.digest] / 2**20:.1f}" if one.digest in sizes else "",
            "yes" if one.pinned else "",
            str(one.num_requests),
            escape(", ".join(one.nodes)),
        )
    console = make_console()
    console.print(table)
    for node in found.nodes:
        if node.problem:
            console.print(f"[yellow]{escape(node.problem)}[/]")


@adapters.command("load")
def load(
    name: Annotated[
        str, typer.Argument(help="New, or the name of an adapter that this one replaces.")
    ],
    source: Annotated[
        str,
        typer.Argument(
            help="The adapter's folder or GGUF file below the nodes' --adapter-root, an installed "
            "package, or a hub id in the machines' caches."
        ),
    ],
    *,
    digest: Annotated[
        str,
        typer.Option(
            help="What the adapter must be, 64 hex characters. By default the router reads it "
            "from its own copy of the files."
        ),
    ] = "",
    base_model: BaseModelOption = "",
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Keep it in memory when others need its slot.")
    ] = False,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Load an adapter on all nodes, and let a name stand for it."""
    found = ask(
        *(access, "LoadAdapter"),
        timeout_s=_LOAD_TIMEOUT_S,
        name=name,
        source=source,
        digest=digest,
        model=base_model,
        pinned=pinned,
    )
    show(found, output, _print)


@adapters.command("alias")
def alias(
    name: Annotated[str, typer.Argument(help="New, or one that is to stand for something else.")],
    target: Annotated[str, typer.Argument(help="The name of an adapter.")],
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let a name stand for the adapter that another name stands for now."""
    found = ask(access, "SetName", name=name, target=target)
    shown = shorten_digest(found.adapter) or "the base model"
    show(found, output, lambda one: make_console().print(f"{escape(one.name)}: {shown}"))


@adapters.command("pin")
def pin(
    name: NameArgument,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let others take its slot again.")] = False,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let an adapter keep its slot on nodes when others need one."""
    show(ask(access, "PinAdapter", name=name, pinned=not undo), output, _print)


@adapters.command("unload")
def unload(
    name: NameArgument,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Remove a name; its adapter leaves nodes once its requests have ended."""
    found = ask(access, "UnloadAdapter", timeout_s=_UNLOAD_TIMEOUT_S, name=name)
    show(found, output, _print)
    if found.num_requests:
        raise AdminError(
            f"{name}: {found.num_requests} requests still run; it leaves with the last one",
            ExitCode.TIMEOUT,
        )


def _print(found: admin_pb2.AdapterChange) -> None:
    console = make_console()
    digest = shorten_digest(found.digest) or "unloaded"
    before = f", before: {shorten_digest(found.previous)}" if found.previous else ""
    console.print(f"{escape(found.name)}: {digest}{before}")
    for node in found.nodes:
        state = "read, and loaded when a request needs it"  # all slots of the node are in use
        if any(one.digest == found.digest for one in node.adapters.adapters):
            state = "[green]loaded[/]"
        if node.problem:
            state = f"[yellow]{escape(node.problem)}[/]"
        console.print(f"  {escape(node.node_name)}: {state}")
