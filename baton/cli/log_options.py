"""The options of logs, declared once for all programs."""

from __future__ import annotations

from typing import Annotated

import typer

LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogFormatOption = Annotated[
    str, typer.Option(help="Lines of the log: text, for people, or json, for programs.")
]
