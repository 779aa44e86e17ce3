"""`baton prefill` and `baton decode`."""

from __future__ import annotations

from typing import Any

import typer

from baton.cli.config_file import program
from baton.registry import Registry
from decode_node.options import DecodeNodeOptions
from node_runtime.run_node import MakeProgram, run_node
from prefill_node.options import PrefillOptions

# By name: torch is imported when a node is made.
_PROGRAMS: Registry[MakeProgram[Any]] = Registry(
    "node program",
    {"prefill": "prefill_node.program:make_program", "decode": "decode_node.program:make_program"},
)


@program
def prefill(options: PrefillOptions) -> None:
    """Compute prompts, push their KV blocks to decode nodes, sample the first token."""
    raise typer.Exit(run_node("prefill", options, lambda: _PROGRAMS.load("prefill")))


@program
def decode(options: DecodeNodeOptions) -> None:
    """Receive prompts' KV blocks from prefill nodes and decode in continuous batches."""
    raise typer.Exit(run_node("decode", options, lambda: _PROGRAMS.load("decode")))
