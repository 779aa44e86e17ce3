"""`baton router`: the command that runs a router."""

from __future__ import annotations

import typer

from baton.cli.config_file import program
from baton.processes.process import run_program
from router.config import RouterConfig, check_exposure


@program
def router(config: RouterConfig) -> None:
    """Serve the public API and place requests on prefill and decode nodes."""
    check_exposure(config)
    # Import here, so that `--help` is fast.
    from baton.checkpoint.model_folder import find_model_folder
    from router.intake.prompt_reader import fork_readers

    # Worker templates must be forked before most modules are imported, while this process has one
    # thread.
    readers = [
        fork_readers(config.texts, find_model_folder(model, weights=False))
        for model in config.models
    ]
    from router.program import serve

    raise typer.Exit(run_program(lambda: serve(config, readers), config.log))
