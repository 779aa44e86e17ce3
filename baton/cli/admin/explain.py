"""`baton admin explain`: why a request went to its nodes, or where a prompt would go now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.api.printable import printable
from baton.cli.admin.connection import (
    BaseModelOption,
    OutputFormat,
    OutputOption,
    TenantOption,
    connection,
)
from baton.cli.admin.output import (
    escape,
    format_number,
    format_time,
    is_json,
    make_console,
    make_table,
    print_first_that_fits,
    print_json,
)
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from rich.table import Table

    from baton.v1 import admin_pb2

# Titles of a place's first columns; "tokens" are prompt tokens that are computed there.
_PLACE, _NUMBERS = ("prefill", "decode", "tokens", "cost"), ("tokens", "cost")


def explain(
    request_id: Annotated[str, typer.Argument(help="Id of one of the last requests.")] = "",
    prompt: Annotated[
        str, typer.Option(help="Instead: a prompt, explained as if it came now.")
    ] = "",
    prompt_tokens: Annotated[
        int,
        typer.Option(help="Instead: length of a prompt that no node has cached, tokens.", min=0),
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option(help="With --prompt or --prompt-tokens: number of output tokens.", min=1)
    ] = 128,
    tenant: TenantOption = "",
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the places that the routing policy considered, and their costs.

    Also shows why the request got its number of draft tokens. With REQUEST_ID, the command shows
    the costs at the time of placement; with --prompt or --prompt-tokens, the present costs.
    """
    if sum(map(bool, (request_id, prompt, prompt_tokens))) != 1:
        raise typer.BadParameter("give one of REQUEST_ID, --prompt and --prompt-tokens")
    what: dict[str, Any] = {"num_prompt_tokens": prompt_tokens}
    if request_id:
        what = {"request_id": request_id}
    elif prompt:
        what = {"prompt": prompt}
    with connection(access) as admin:
        found = admin.call(
            "Explain", max_tokens=max_tokens, tenant=tenant, model=base_model, **what
        )
        trace = None
        if request_id and not is_json(output):
            trace = admin.call("Trace", request_id=request_id, tenant=tenant)
    if is_json(output):
        print_json(found)
        return
    if not found.decisions:
        typer.echo("it was not placed")
    for number, decision in enumerate(found.decisions, start=1):
        _print(decision, f"attempt {number}" if request_id else f"now, by {found.policy}")
    if trace is not None and trace.receipt.decode.why_drafts:
        typer.echo(f"at its end {printable(trace.receipt.decode.why_drafts)}")


def _print(decision: admin_pb2.DecisionDescription, title: str) -> None:
    console = make_console()
    path = " and ".join(filter(None, (decision.prefill_node, decision.decode_node)))
    console.print(
        f"[bold]{title}[/]  [dim]{format_time(decision.placed_at)}[/]  {escape(path)}  [dim]"
        f"{decision.num_prompt_tokens} prompt tokens, {decision.num_cached_tokens} of them cached, "
        f"{decision.max_tokens} may follow[/]"
    )
    if decision.is_probe:
        console.print("[dim]a probe: this node was not asked for long[/]")
    if decision.HasField("forecast"):
        console.print(_forecast(decision.forecast), style="dim")
    for source in decision.prefix_sources:
        console.print(_source(source), style="dim")
    if not decision.candidates:
        console.print("this policy compares no costs", style="dim")
        return
    print_first_that_fits(console, _columns(decision), _sentences(decision))


def _forecast(forecast: admin_pb2.PrefillForecast) -> str:
    """Return a line that compares the expected and the measured time of a prompt."""
    wait_ms, compute_ms = format_number(forecast.wait_ms), format_number(forecast.compute_ms)
    text = (
        f"prefill of {forecast.num_tokens} tokens: expected {wait_ms} ms of waiting "
        f"and {compute_ms} ms of computing"
    )
    if not forecast.is_measured:
        return f"{text}, not measured"
    measured = (forecast.measured_wait_ms, forecast.measured_compute_ms)
    return f"{text}, measured {' and '.join(map(format_number, measured))}"


def _source(source: admin_pb2.PrefixSourceDescription) -> str:
    """Return a line that compares the expected times to fetch and to compute missing tokens."""
    fetch_ms, compute_ms = format_number(source.fetch_ms), format_number(source.compute_ms)
    what = "fetched" if source.is_chosen else "not fetched"
    return (
        f"{source.num_tokens} tokens to get from {escape(source.node)}: {fetch_ms} ms to fetch "
        f"and {compute_ms} ms to compute, {what}"
    )


def _columns(decision: admin_pb2.DecisionDescription) -> Table:
    """Make a table of the considered places, with a column per term of the cost."""
    terms = list(dict.fromkeys(term.name for one in decision.candidates for term in one.terms))
    titles = [name.replace("_", " ") for name in terms]
    table = make_table(*_PLACE, *titles, right=(*_NUMBERS, *titles))
    for one in decision.candidates:
        values = {term.name: term.value for term in one.terms}
        cells = (format_number(values[name]) if name in values else "" for name in terms)
        table.add_row(*_place(one), *cells)
    return table


def _sentences(decision: admin_pb2.DecisionDescription) -> Table:
    """Make a table of the considered places, with all nonzero terms of the cost in one column."""
    table = make_table(*_PLACE, "made of", right=_NUMBERS)
    for one in decision.candidates:
        parts = (
            f"{term.name.removesuffix('_ms').replace('_', ' ')} {format_number(term.value)}"
            for term in one.terms
            if term.value
        )
        table.add_row(*_place(one), ", ".join(parts))
    return table


def _place(one: admin_pb2.CandidateDescription) -> tuple[str, str, str, str]:
    nodes = escape(one.prefill_node or "-"), escape(one.decode_node)
    return *nodes, str(one.num_computed_tokens or "-"), format_number(one.cost, 4)
