"""`baton model show MODEL`: computes from a model's configuration how much memory it needs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from baton.api.errors import BatonError
from baton.checkpoint.model_folder import find_model_folder
from baton.cli.admin.connection import OutputFormat, OutputOption
from baton.cli.admin.output import is_json, make_console, make_table, print_json
from baton.cli.command_line import CommandLine
from baton.processes.process import print_error
from baton.registry import Registry

_HELP = "Show how much memory a model needs."
_MIB = 2**20
# Function that computes the memory; given as text, because `baton` must not import `models`.
_NEEDS: Registry[Any] = Registry("figure", {"memory": "models.memory_needs:memory_needs_of_folder"})

app = CommandLine(no_args_is_help=True, add_completion=False, help=_HELP)


@app.callback()
def _group() -> None:
    """Make Typer keep a group of commands even if it has a single command."""


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file or a hub id.")],
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the memory that a CPU node needs: weights for each --weights, and KV blocks."""
    try:
        needs = _NEEDS.load("memory")(find_model_folder(model, weights=False))
    except BatonError as error:
        print_error(str(error))
        raise typer.Exit(1) from error
    if is_json(output):
        print_json(
            {
                "weights_bytes": needs.weights,
                "kv_token_bytes": needs.kv_token_bytes,
                "kv_block_bytes": needs.kv_block_bytes,
                "block_size": needs.block_size,
            }
        )
        return
    table = make_table("--weights", "MiB", right=("MiB",))
    for name, num_bytes in needs.weights.items():
        table.add_row(name, f"{num_bytes / _MIB:,.0f}")
    console = make_console()
    console.print(table)
    console.print(
        f"KV cache: {needs.kv_token_bytes / 1024:,.1f} KiB a token, "
        f"{needs.kv_block_bytes / 1024:,.0f} KiB a block of {needs.block_size} tokens"
    )
