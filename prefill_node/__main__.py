"""`baton prefill`."""

from __future__ import annotations

from baton.cli.command_line import CommandLine
from baton.cli.node_options import node_command

SUMMARY = "Compute prompts, push their KV blocks to decode nodes, sample the first token."

app = CommandLine(add_completion=False)
app.command()(node_command("prefill", SUMMARY, "prefill_node.program:make_program"))

if __name__ == "__main__":
    app(prog_name="baton prefill")
