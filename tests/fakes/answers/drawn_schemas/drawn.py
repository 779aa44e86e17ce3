"""DrawnSchema: a random JSON schema as people's libraries write it, with judges of values.

Two validators judge, which know nothing of the engine: jsonschema and jsonschema_rs, with formats.
A schema that pydantic wrote is judged by its model, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import jsonschema_rs

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnSchema:
    """A schema and who wrote it.

    Attributes:
        judge: returns what is wrong with a text in JSON, or an empty text; the writer's own judge.
    """

    schema: Schema
    writer: str
    judge: Callable[[str], str] = field(default=lambda text: "")

    def problem_of(self, text: str) -> str:
        """Say why a text does not fit the schema; empty if the text fits."""
        try:
            values = [json.loads(text), json.loads(text, object_pairs_hook=_with_first)]
        except ValueError as error:
            return f"no JSON: {error}"
        for value in values:
            if problem := self._problem_of_value(value):
                return problem
        return self.judge(text)

    def _problem_of_value(self, value: Any) -> str:
        validator_class = jsonschema.validators.validator_for(
            self.schema, default=jsonschema.Draft202012Validator
        )
        validator = validator_class(self.schema, format_checker=validator_class.FORMAT_CHECKER)
        for error in validator.iter_errors(value):
            return f"jsonschema: {error.message[:200]}"
        if _has_infinity(value):
            return ""  # a number that jsonschema_rs cannot have
        second = jsonschema_rs.validator_for(self.schema, validate_formats=True)
        return "" if second.is_valid(value) else "jsonschema_rs: does not fit"


def _has_infinity(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return True
    return False


def _with_first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keep the first value of a name: a name that is open may come twice, and both must fit."""
    found = dict[str, Any]()
    for name, value in pairs:
        found.setdefault(name, value)
    return found
