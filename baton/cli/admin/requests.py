"""`baton admin requests`, `trace` and `abort`: list, follow and end requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.admin.connection import (
    OptionalNodeArgument,
    OutputFormat,
    OutputOption,
    TenantOption,
    ask,
    connection,
)
from baton.cli.admin.output import (
    escape,
    format_count,
    format_seconds,
    format_time,
    is_json,
    make_console,
    make_table,
    print_first_that_fits,
    print_json,
)
from baton.cli.router_access import OperatorAccess
from baton.telemetry.receipt_table import format_bytes

if TYPE_CHECKING:
    from baton.v1 import admin_pb2, types_pb2

RequestArgument = Annotated[
    str, typer.Argument(help="Id of a request, see `baton admin requests`.")
]
_STYLES = {"running": "green", "failed": "red", "queued": "yellow"}


def requests(
    node: OptionalNodeArgument = "",
    limit: Annotated[int, typer.Option(help="Most requests of the router to list.", min=1)] = 20,
    open: Annotated[
        bool, typer.Option("--open", help="Of the router's requests, list only those in progress.")
    ] = False,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the last requests of the router, or all open requests of one node."""
    with connection(access) as admin:
        if node:
            of_node = admin.call("ListNodeRequests", node=node)
        else:
            found = admin.call("ListRequests", limit=limit, open_only=open)
    if is_json(output):
        print_json(of_node if node else found)
    elif node:
        _print_of_node(of_node)
    else:
        _print_of_router(found.requests)


def trace(
    request_id: RequestArgument,
    tenant: TenantOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show when each thing happened to one of the router's last requests."""
    found = ask(access, "Trace", request_id=request_id, tenant=tenant)
    if is_json(output):
        print_json(found)
        return
    console = make_console()
    style = _STYLES.get(found.state, "cyan")
    console.print(
        f"[bold]{escape(found.request_id)}[/]  [{style}]{found.state}[/]  "
        f"{found.num_prompt_tokens} + {found.num_output_tokens} of at most "
        f"{found.max_tokens} tokens"
    )
    if found.model:
        by = f", adapter {found.adapter}" if found.adapter else ""
        console.print(f"as {escape(found.model)}{by}", soft_wrap=True)
    table = make_table("after", "what", right=("after",))
    for after_s, what in sorted(_events(found), key=lambda event: event[0]):
        table.add_row(format_seconds(after_s) if after_s else "0", what)
    console.print(table)


def abort(
    request_id: RequestArgument,
    tenant: TenantOption = "",
    *,
    access: OperatorAccess,
) -> None:
    """End an open request, on its nodes too; its client is told CANCELLED."""
    ask(access, "Abort", request_id=request_id, tenant=tenant)
    typer.echo(f"{request_id} is ended")


def _print_of_router(found: Sequence[admin_pb2.RequestTrace]) -> None:
    """Print a table with a row per request, and with fewer columns if the console is narrow.

    Model names have a column only if the requests have several names.
    """
    numbers = ("in", "out", "TTFT", "total", "tries")
    names = ["model"] if len({one.model for one in found}) > 1 else []
    wide, narrow = (
        make_table(*columns, right=numbers, whole=("request",))
        for columns in (
            ("received", "request", "state", *numbers, *names, "nodes"),
            ("request", "state", *numbers[:-1]),
        )
    )
    for one in found:
        style = _STYLES.get(one.state, "cyan")
        last = one.attempts[-1] if one.attempts else None
        path = " > ".join(filter(None, (last.prefill_node, last.decode_node))) if last else ""
        cells = (
            escape(one.request_id),
            f"[{style}]{one.error_code or one.state}[/]",
            str(one.num_prompt_tokens),
            str(one.num_output_tokens),
            format_seconds(one.first_token_s) if one.HasField("first_token_s") else "",
            format_seconds(one.ended_s) if one.HasField("ended_s") else "",
        )
        received = format_time(one.received_at)
        name = [escape(one.model)] if names else []
        wide.add_row(received, *cells, str(len(one.attempts)), *name, escape(path))
        narrow.add_row(*cells)
    console = make_console()
    if wide.row_count:
        print_first_that_fits(console, wide, narrow)
    else:
        console.print("there were no requests")


def _print_of_node(found: admin_pb2.ListRequestsResponse) -> None:
    numbers = ("tokens", "computed", "blocks", "age")
    wide, narrow = (
        make_table("request", "status", *columns, right=numbers, whole=("request",))
        for columns in (("transfer", *numbers), ("blocks", "age"))
    )
    for one in found.requests:
        first, last = (escape(one.request_id), one.status), format_seconds(one.age_s)
        num_computed, num_blocks = str(one.num_computed_tokens), str(one.num_blocks)
        wide.add_row(
            *first, one.transfer_state, str(one.num_tokens), num_computed, num_blocks, last
        )
        narrow.add_row(*first, num_blocks, last)
    console = make_console()
    if wide.row_count:
        print_first_that_fits(console, wide, narrow)
    console.print(
        f"{len(found.requests)} requests; {found.num_free_blocks} of {found.num_blocks} blocks "
        f"free, {found.num_quarantined_blocks} in quarantine"
    )


def _events(found: admin_pb2.RequestTrace) -> Iterator[tuple[float, str]]:
    """Yield each event of a request: seconds since the request was received, and a description."""
    yield 0.0, f"received at {format_time(found.received_at)}"
    yield found.accepted_s, f"checked and tokenized: {found.num_prompt_tokens} tokens"
    for number, attempt in enumerate(found.attempts, start=1):
        path = " and ".join(filter(None, (attempt.prefill_node, attempt.decode_node)))
        yield attempt.began_s, f"attempt {number}: placed on {escape(path)}"
        if attempt.HasField("failed_s"):
            problem = escape(f"{attempt.error_code}: {attempt.error}")
            yield attempt.failed_s, f"[red]attempt {number} failed: {problem}[/]"
    if found.HasField("first_token_s"):
        yield found.first_token_s, "first token" + _prefill_account(found.receipt)
    if found.HasField("ended_s"):
        if found.error_code:
            problem = escape(f"{found.error_code}: {found.error}")
            yield found.ended_s, f"[red]failed: {problem}[/]"
        else:
            yield found.ended_s, f"finished ({found.finish_reason})" + _decode_account(found)


def _prefill_account(receipt: types_pb2.Receipt) -> str:
    if not receipt.ttft_s:
        return ""
    # Import here, because the module imports gRPC's messages, which `--help` does not need.
    from baton.wire.types import receipt_from_proto

    parts = receipt_from_proto(receipt).ttft_parts.items()
    way = ", ".join(f"{name.removesuffix('_s')} {format_seconds(max(s, 0.0))}" for name, s in parts)
    return _computing_account(receipt) + f"; parts: {way}"


def _computing_account(receipt: types_pb2.Receipt) -> str:
    if not receipt.HasField("prefill"):
        return ""
    prefill, name = receipt.prefill, escape(receipt.prefill_node)
    return (
        f": {name} queued the prompt for {format_seconds(prefill.queue_s)}, "
        f"computed {prefill.num_computed_tokens} tokens in {format_seconds(prefill.prefill_s)} and "
        f"had {prefill.num_cached_tokens} cached"
        + _fetch_account(prefill)
        + _encodings_account(prefill)
    )


def _fetch_account(receipt: types_pb2.PrefillReceipt | types_pb2.DecodeReceipt) -> str:
    """Return a text about the tokens that another node sent; empty if no node was asked."""
    waited = format_seconds(receipt.fetch_wait_s)
    if receipt.num_fetched_tokens:
        return f", {receipt.num_fetched_tokens} of them fetched within {waited}"
    return f"; a fetch was lost within {waited}" if receipt.num_fetches_lost else ""


def _encodings_account(prefill: types_pb2.PrefillReceipt) -> str:
    """Return a text that says how many images encode nodes encoded; empty if none was asked."""
    received, lost = prefill.num_encodings_received, prefill.num_encodings_lost
    if not received + lost:
        return ""
    waited = format_seconds(prefill.encodings_wait_s)
    return f"; encodings: {received} received, {lost} lost, within {waited}"


def _decode_account(found: admin_pb2.RequestTrace) -> str:
    receipt = found.receipt
    text = f": {found.num_output_tokens} tokens"
    if receipt.num_output_tokens > 1:
        per_token_s = (receipt.total_s - receipt.ttft_s) / (receipt.num_output_tokens - 1)
        text += f", {format_seconds(per_token_s)} each"
    if not receipt.HasField("decode"):
        return text
    decode = receipt.decode
    return text + (
        f"; {escape(receipt.decode_node)} {_push_account(decode.push)}; "
        f"parked {format_seconds(decode.parked_s)}, "
        f"first step {format_seconds(decode.first_step_s)} later, "
        f"{decode.num_preemptions} preemptions"
        + (
            f"; had {decode.num_cached_tokens} prompt tokens cached{_fetch_account(decode)}"
            if decode.fetch_wait_s
            else ""
        )
        + (
            f"; {decode.num_accepted_drafts} of {decode.num_drafts} drafts accepted"
            if decode.num_drafts
            else ""
        )
    )


def _push_account(push: types_pb2.PushReceipt) -> str:
    """Return a text that says how much KV the decode node received, by which transport."""
    if not push.num_blocks:
        return "got no KV blocks from another node"
    by = f" by {escape(push.transport)}" if push.transport else ""
    return (
        f"got {format_bytes(push.num_bytes)} ({format_count(push.num_blocks)} blocks){by}, "
        f"{format_seconds(push.exposed_transfer_s)} of it exposed"
    )
