"""Options of `baton generate` that give the form of the output. Knows no grammar library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.api.bounded_files import read_text
from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput

JsonSchemaOption = Annotated[
    str | None,
    typer.Option(help="JSON schema that the output must fit: a file, or the schema itself."),
]
RegexOption = Annotated[
    str | None, typer.Option(help="Regular expression that the whole output must match.")
]
GrammarOption = Annotated[
    str | None,
    typer.Option(
        help="Lark or GBNF grammar that the output must fit: a file, or the grammar itself."
    ),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option(help="One of the texts that the output may be; repeat it for the others."),
]
JsonObjectOption = Annotated[bool, typer.Option(help="The output must be a JSON object.")]


def make_structured_output(
    json_schema: str | None,
    regex: str | None,
    grammar: str | None,
    choice: list[str] | None,
    json_object: bool,
) -> StructuredOutput | None:
    """Return the output form that the options give, or None; raises InvalidRequestError."""
    if json_schema is None and regex is None and grammar is None and not choice and not json_object:
        return None
    return StructuredOutput(
        json_schema=_read("json_schema", json_schema),
        regex=regex,
        grammar=_read("grammar", grammar),
        choice=tuple(choice or ()),
        json_object=json_object,
    )


def _read(kind: str, value: str | None) -> str | None:
    """Return the content of the file that an option's value names, or else the value itself."""
    if value is None:
        return None
    try:
        return read_text(Path(value))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"structured_output.{kind}", f"{value} is not text: {error.reason}"
        ) from None
    except (OSError, ValueError):  # missing file, or no file name
        return value
