"""`baton decode`: options, set-up, graceful end."""

from __future__ import annotations

from collections.abc import Callable

import typer

from baton.cli.node_options import NodeOptions, node_command
from baton.errors import ConfigError
from baton.link import NodeEvent
from baton.model_folder import find_model_folder
from baton.node_program import NodeProgram, run_node_program
from baton.process import run_program
from baton.rpc import split_address

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def run(options: NodeOptions) -> int:
    """Run a decode node to its end; returns the exit code."""

    def make_node(
        emit: Callable[[NodeEvent], None], on_death: Callable[[Exception], None]
    ) -> NodeProgram:
        # Before torch is imported: what the user got wrong is said at once.
        split_address("router", options.router)
        split_address("listen", options.listen)
        find_model_folder(options.model)
        try:
            from decode_node.program import DecodeProgram
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed; a node needs: pip install 'baton-serve[node]'"
            ) from error
        return DecodeProgram(options, emit, on_death)

    return run_program(
        lambda: run_node_program(
            make_node,
            router=options.router,
            listen=options.listen,
            join_timeout_s=options.join_timeout_s,
        ),
        log_level=options.log_level,
    )


app.command()(
    node_command(
        "decode",
        "Receive prompts' KV blocks from prefill nodes and decode in continuous batches.",
        run,
    )
)

if __name__ == "__main__":
    app(prog_name="baton decode")
