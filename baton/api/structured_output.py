"""StructuredOutput: constrains an output to a JSON schema, regex, grammar or list of choices.

Knows neither models nor grammar libraries; `baton/text/grammars.py` compiles the constraint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.api.errors import InvalidRequestError

MAX_TEXT_BYTES = 65_536
MAX_CHOICES = 1000
KINDS = ("json_schema", "regex", "grammar", "choice", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StructuredOutput:
    """The form that an output must have, which exactly one of the fields gives.

    If no field or several fields are given, InvalidRequestError is raised.

    Attributes:
        json_schema: a JSON Schema, as text or as a mapping; stored as text.
        regex: pattern for the whole output (syntax of Rust's `regex` crate, no look-around).
        grammar: a context-free grammar, in llguidance's Lark dialect (its first rule is ``start``)
            or in GBNF (``root ::= ...``).
        choice: the allowed outputs, at most 1000.
        json_object: allow any JSON object.
    """

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _invalid("json_object", f"must be true or false, got {self.json_object!r}")
        object.__setattr__(self, "choice", _choices(self.choice))
        # A field with an empty value counts as given, and the value is then refused.
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, (), False)]
        if len(given) != 1:
            raise InvalidRequestError(
                "structured_output",
                f"must have exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}",
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.kind in ("json_schema", "regex", "grammar"):
            _check_text(self.kind, self.text)

    @property
    def kind(self) -> str:
        """Name of the only field that has a value."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, (), False))

    @property
    def text(self) -> str:
        """The text of the schema, regex or grammar; empty for other kinds of forms."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else ""

    def __repr__(self) -> str:
        """Return a description with sizes only, because logs must not contain users' texts."""
        size = f"{len(self.choice)} texts" if self.choice else f"{len(self.text)} characters"
        return f"StructuredOutput({self.kind}: {size})"


def _invalid(kind: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_output.{kind}", problem)


def _schema_text(value: object) -> str:
    """Return a schema as compact JSON. The keys keep their order, which outputs will have, too."""
    if isinstance(value, str):
        # Check the size of the text before parsing it.
        _check_text("json_schema", value)
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise _invalid("json_schema", f"must be a JSON object, got {type(schema).__name__}")
        return json.dumps(dict(schema), separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise _invalid("json_schema", "is nested too deeply") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise _invalid("json_schema", f"is not JSON: {error}") from None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _invalid("choice", f"must be a list of texts, got {value!r}")
    choices = tuple(value)
    if len(choices) > MAX_CHOICES:
        raise _invalid("choice", f"must have at most {MAX_CHOICES}, got {len(choices)}")
    for text in choices:
        _check_text("choice", text)
    num_bytes = sum(len(text.encode()) for text in choices)
    if num_bytes > MAX_TEXT_BYTES:
        raise _invalid("choice", f"must have at most {MAX_TEXT_BYTES} bytes, got {num_bytes}")
    return choices


def _check_text(kind: str, text: object) -> None:
    if not isinstance(text, str):
        raise _invalid(kind, f"must be text, got {type(text).__name__}")
    if not text:
        raise _invalid(kind, "must not be empty")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid(kind, f"is not valid Unicode at {error.start}") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise _invalid(kind, f"must have at most {MAX_TEXT_BYTES} bytes, got {num_bytes}")
