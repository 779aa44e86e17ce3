"""`baton router`."""

from __future__ import annotations

import typer

from baton.cli.config_file import program
from baton.processes.process import run_program
from router.config import RouterConfig


@program
def router(config: RouterConfig) -> None:
    """Serve the public API and place requests on prefill and decode nodes."""
    # Imported here: who asks for help does not wait for it.
    from router.program import serve

    raise typer.Exit(run_program(lambda: serve(config), config.log))
