"""`baton admin policy`, `flush-cache`, `drop-pins`, `log-level` and `profile`: tune a system."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.api.printable import printable
from baton.cli.admin.connection import (
    TIMEOUT_S,
    BaseModelOption,
    ExitCode,
    OptionalNodeArgument,
    OutputFormat,
    OutputOption,
    ServerArgument,
    ask,
)
from baton.cli.admin.output import (
    escape,
    format_seconds,
    is_json,
    make_console,
    make_table,
    print_json,
    show,
)
from baton.cli.command_line import CommandLine
from baton.cli.router_access import OperatorAccess

ROUTER = "router"

policy = CommandLine(
    no_args_is_help=True, add_completion=False, help="See or change how requests are placed."
)


@policy.command("get")
def get_policy(
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the routing policy, and all available policies."""
    found = ask(access, "GetPolicy")
    if is_json(output):
        print_json(found)
        return
    for name in found.known:
        typer.echo(f"{'*' if name == found.policy else ' '} {name}")


@policy.command("set")
def set_policy(
    name: Annotated[
        str, typer.Argument(help="One of the policies that `baton admin policy get` lists.")
    ],
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Place requests by another policy, until the router's next start."""
    found = ask(access, "SetPolicy", policy=name)
    show(found, output, lambda one: typer.echo(f"the policy is {one.policy}"))


def flush_cache(
    node: OptionalNodeArgument = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Empty the prefix cache of a node, or of all; running requests keep their blocks."""
    found = ask(access, "FlushCache", node=node)
    if is_json(output):
        print_json(found)
    else:
        for one in found.nodes:
            forgotten = printable(one.problem) or f"{one.num_prefixes} blocks forgotten"
            typer.echo(f"{printable(one.node_name)}: {forgotten}")
    if any(one.problem for one in found.nodes):
        raise typer.Exit(ExitCode.ERROR)


def drop_pins(
    session_id: Annotated[str, typer.Argument(help="Id of the session.")] = "",
    cache_key: Annotated[
        str, typer.Option(help="The session's prompt_cache_key, instead of its id.")
    ] = "",
    tenant: Annotated[
        str, typer.Option(help="Tenant of the session; empty: your own tenant.")
    ] = "",
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
) -> None:
    """End the pins of one session; nodes then keep its prefix no longer than other prefixes."""
    names = {"session_id": session_id, "prompt_cache_key": cache_key}
    found = ask(access, "DropPins", **names, tenant=tenant, model=base_model)
    typer.echo(f"{found.num_nodes} nodes were told")


def log_level(
    name: ServerArgument,
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    module: Annotated[
        str,
        typer.Option(
            help="Module, as logs name it, whose level changes, with all modules inside it."
        ),
    ] = "",
    *,
    access: OperatorAccess,
) -> None:
    """Set the log level of a node, or of the router (named `router`), from now on."""
    node = "" if name == ROUTER else name
    found = ask(access, "SetLogLevel", node=node, level=level, module=module)
    whose = f" of {module}" if module else ""
    typer.echo(f"{name} logs {level} and above{whose}; it was {found.previous}")


def profile(
    name: ServerArgument,
    seconds: Annotated[
        float, typer.Option(help="How long to sample, seconds.", min=0.1, max=60)
    ] = 5.0,
    limit: Annotated[int, typer.Option(help="Most functions to print.", min=1)] = 20,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show where a node's engine, or the router (named `router`), spends its time.

    Samples the stack of the thread that does the work, 200 times a second. Time in C code, such
    as torch's, counts for the Python function that called the C code.
    """
    node = "" if name == ROUTER else name
    found = ask(access, "Profile", timeout_s=TIMEOUT_S + seconds, node=node, seconds=seconds)
    if is_json(output):
        print_json(found)
        return
    console = make_console()
    console.print(
        f"thread {found.thread} of {escape(name)}: {found.num_samples} samples in "
        f"{format_seconds(found.seconds)}"
    )
    table = make_table("own", "total", "function", "place", right=("own", "total"))
    for one in found.functions[:limit]:
        table.add_row(
            f"{100 * one.num_own / found.num_samples:.1f}%",
            f"{100 * one.num_total / found.num_samples:.1f}%",
            escape(one.function),
            escape(one.place),
        )
    console.print(table)
