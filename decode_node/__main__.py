"""`baton decode`."""

from __future__ import annotations

from baton.cli.command_line import CommandLine
from baton.cli.decode_options import decode_command

SUMMARY = "Receive prompts' KV blocks from prefill nodes and decode in continuous batches."

app = CommandLine(add_completion=False)
app.command()(decode_command(SUMMARY, "decode_node.program:make_program"))

if __name__ == "__main__":
    app(prog_name="baton decode")
