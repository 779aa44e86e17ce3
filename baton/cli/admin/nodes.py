"""`baton admin nodes` and `baton admin node`: show joined nodes, their load and their peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.cli.admin.connection import (
    NodeArgument,
    OutputFormat,
    OutputOption,
    ask,
    connection,
)
from baton.cli.admin.output import (
    enum_field,
    escape,
    format_bar,
    format_count,
    format_seconds,
    is_json,
    make_console,
    make_grid,
    make_table,
    print_first_that_fits,
    print_json,
)
from baton.cli.router_access import OperatorAccess
from baton.telemetry.rates import format_rate
from baton.telemetry.receipt_table import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from baton.v1 import admin_pb2

_STYLES = {"serving": "green", "draining": "yellow", "drained": "cyan", "lost": "red"}


def nodes(
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the nodes that have joined a router, how busy they are, and which nodes they reach."""
    response = ask(access, "ListNodes")
    if is_json(output):
        print_json(response)
        return
    console = make_console()
    if response.nodes:
        found = response.nodes
        tables = nodes_table(found), nodes_table(found, bar_width=3)
        print_first_that_fits(console, *tables, breaks_lines=False)
    else:
        console.print("no node has joined")
    print_problems(console, response.nodes)


def node(
    name: NodeArgument,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show one node."""
    with connection(access) as admin:
        found = admin.node(name)
    if is_json(output):
        print_json(found)
        return
    console = make_console()
    console.print(_card(found))
    if found.peers:
        peers = make_table("peer", "transport", "bandwidth", right=("bandwidth",))
        for peer in found.peers:
            rate = peer.bandwidth_bytes_per_s
            peers.add_row(
                escape(peer.node_name), _transport(peer), format_rate(rate) if rate else ""
            )
        console.print("", peers)
    print_problems(console, [found])


def role_of(found: admin_pb2.NodeDescription) -> str:
    """Return a node's role in one word, such as ``prefill``."""
    return enum_field(found, "role")


def state_of(found: admin_pb2.NodeDescription) -> str:
    """Return a node's state as its router sees it, in one word."""
    if found.lost:
        return "lost"
    serving_state = enum_field(found.beat, "serving_state")
    return (found.health or "serving") if serving_state == "serving" else serving_state


def num_ranks(found: admin_pb2.NodeDescription) -> int:
    """Return the number of processes that share the node's model."""
    return max(1, found.tensor_parallel_size) * max(1, found.pipeline_parallel_size)


def ranks_of(found: admin_pb2.NodeDescription) -> str:
    """Return how many ranks share a node's model: ``1``, ``TP 2``, ``PP 2`` or ``TP 2 x PP 2``."""
    sizes = {"TP": found.tensor_parallel_size, "PP": found.pipeline_parallel_size}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"


def kv_bar(found: admin_pb2.NodeDescription, width: int = 8) -> str:
    """Draw a bar of the share of a node's KV blocks in use; "?" before the node's first beat."""
    if not found.HasField("beat") or not found.num_blocks:
        return "?"
    return format_bar(1 - found.beat.num_free_blocks / found.num_blocks, width)


def nodes_table(
    found: Sequence[admin_pb2.NodeDescription], *, peers: bool = True, bar_width: int = 8
) -> Table:
    """Return a table with a row per node."""
    numbers = ("open", "run", "wait")
    # The column of ranks is left out if no node has several ranks.
    has_ranks = any(num_ranks(one) > 1 for one in found)
    columns = ["node", "role", *(["ranks"] if has_ranks else []), "state", *numbers, "KV in use"]
    more = ["peers"] if peers else []
    table = make_table(*columns, *more, right=numbers, whole=("KV in use", "peers"))
    for one in found:
        state, beat = state_of(one), one.beat
        cells = [
            escape(one.node_name),
            role_of(one),
            *([ranks_of(one)] if has_ranks else []),
            f"[{_STYLES.get(state, 'yellow')}]{state}[/]",
            *(
                ("", "", "", "")
                if one.lost
                else (
                    str(one.num_requests),
                    str(beat.num_running),
                    str(beat.num_waiting + beat.num_waiting_for_remote_kvs),
                    kv_bar(one, bar_width),
                )
            ),
        ]
        if peers:
            cells.append("\n".join(_path(peer) for peer in one.peers))
        table.add_row(*cells)
    return table


def print_problems(console: Console, found: Sequence[admin_pb2.NodeDescription]) -> None:
    """Print the problems of pairs (each pair once) and of nodes' health, in sentences."""
    for problem in sorted({peer.problem for one in found for peer in one.peers}):
        if problem:
            console.print(f"not paired: {escape(problem)}", style="yellow", soft_wrap=True)
    for one in found:
        if one.health_why and one.health not in ("", "serving"):
            console.print(
                f"{escape(one.node_name)} is {one.health}: {escape(one.health_why)}",
                style="yellow",
                soft_wrap=True,
            )


def _card(one: admin_pb2.NodeDescription) -> Table:
    """Return a node's properties as a table of two columns."""
    state = state_of(one)
    table = make_grid()
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("node", f"[bold]{escape(one.node_name)}[/]  {role_of(one)}")
    table.add_row("state", f"[{_STYLES.get(state, 'yellow')}]{state}[/]")
    if num_ranks(one) > 1:
        table.add_row("ranks", f"{ranks_of(one)}: {num_ranks(one)} processes")
    table.add_row("engine id", escape(one.engine_id))
    table.add_row("address", one.address)
    table.add_row("version", escape(one.version))
    if one.lost:
        return table
    beat = one.beat
    table.add_row("requests", f"{one.num_requests} open from this router")
    table.add_row(
        "",
        f"{beat.num_running} running, {beat.num_waiting} waiting, "
        f"{beat.num_waiting_for_remote_kvs} waiting for KV, of all routers",
    )
    if beat.num_waiting_for_encodings:
        table.add_row("", f"{beat.num_waiting_for_encodings} of the waiting wait for encodings")
    if beat.num_decoding_images:
        table.add_row("", f"images of {beat.num_decoding_images} of the waiting are being decoded")
    if beat.num_waiting_for_prefixes:
        table.add_row("", f"{beat.num_waiting_for_prefixes} of the waiting wait for cached KV")
    table.add_row("transfers", str(beat.num_transfers))
    num_used = str(one.num_blocks - beat.num_free_blocks) if one.HasField("beat") else "?"
    table.add_row(
        "KV blocks",
        f"{kv_bar(one)}  {num_used} of {one.num_blocks} in use, "
        f"{beat.num_quarantined_blocks} in quarantine",
    )
    if beat.cache.num_files or beat.cache.file_tokens:
        kept = "bucket" if beat.cache.are_objects else "folder"
        table.add_row(
            "KV files",
            f"{format_bytes(beat.cache.file_bytes)} in the {kept}; this node has read "
            f"{format_count(beat.cache.file_tokens)} tokens",
        )
    table.add_row(
        "room",
        f"{format_count(one.num_blocks * one.block_size)} tokens in blocks of {one.block_size}; "
        f"at most {one.max_model_len} per request",
    )
    table.add_row("weight", f"{one.weight:g}")
    if one.prefill_tokens_per_s:
        table.add_row("prompts", f"{format_count(one.prefill_tokens_per_s)} tokens/s, measured")
    if one.step_s:
        table.add_row("step", f"{format_seconds(one.step_s)}, measured")
    return table


def _path(peer: admin_pb2.PeerDescription) -> str:
    """Return a line about the connection to a peer, such as ``d0: nixl/ucx cma 2.9 GB/s``."""
    rate = peer.bandwidth_bytes_per_s
    words = [f"{escape(peer.node_name)}:", _transport(peer)]
    return " ".join([*words, format_rate(rate)] if rate else words)


def _transport(peer: admin_pb2.PeerDescription) -> str:
    if peer.transport:
        return escape(peer.transport)
    return "not paired" if peer.problem else "..."
