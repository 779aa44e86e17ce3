"""The options of how conversations become prompts, declared once for the router and `baton up`."""

from __future__ import annotations

from typing import Annotated

import typer

ServedModelNameOption = Annotated[
    str, typer.Option(help="What HTTP clients call the model; as --model if not given.")
]
ChatTemplateOption = Annotated[
    str, typer.Option(help="A Jinja file that is used instead of the checkpoint's chat template.")
]
GenerationConfigOption = Annotated[
    str,
    typer.Option(
        help="auto: what the checkpoint's generation_config.json recommends to sample with is the "
        "default of HTTP requests; or none."
    ),
]
