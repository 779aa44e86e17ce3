"""`baton decode`."""

from __future__ import annotations

import typer

from baton.cli.node_options import node_command

SUMMARY = "Receive prompts' KV blocks from prefill nodes and decode in continuous batches."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(node_command("decode", SUMMARY, "decode_node.program:make_program"))

if __name__ == "__main__":
    app(prog_name="baton decode")
