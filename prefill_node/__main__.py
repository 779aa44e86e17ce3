"""`baton prefill`."""

from __future__ import annotations

import typer

from baton.cli.node_options import node_command

SUMMARY = "Compute prompts, push their KV blocks to decode nodes, sample the first token."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(node_command("prefill", SUMMARY, "prefill_node.program:make_program"))

if __name__ == "__main__":
    app(prog_name="baton prefill")
