"""`baton decode`."""

from __future__ import annotations

import typer

from baton.cli.decode_options import decode_command

SUMMARY = "Receive prompts' KV blocks from prefill nodes and decode in continuous batches."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(decode_command(SUMMARY, "decode_node.program:make_program"))

if __name__ == "__main__":
    app(prog_name="baton decode")
