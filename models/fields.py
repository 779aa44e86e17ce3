"""Fields: typed reading of a JSON file's fields. Errors have one line with file and field.

Refuses to know: which fields a model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeGuard

from baton.api.bounded_files import read_object
from baton.api.errors import ModelLoadError

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30
# Maximum number of layers, experts and other things that are built one by one: a larger number in a
# file is refused, so that a broken file does not keep a process busy.
MAX_PARTS = 2**14
_MAX_PROBLEM_CHARS = 2000


class Fields:
    """The fields of a JSON object, checked as they are read. A null counts as absent or false.

    Args:
        values: the JSON object.
        source: the file, for error messages.
        prefix: path of the object within the file, for error messages ("rope_scaling.").
    """

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    @classmethod
    def from_file(cls, path: Path) -> Fields:
        """Read a JSON file; raises ModelLoadError if it is missing, not JSON or not an object."""
        return cls(read_object(path), str(path))

    def replaced(self, change: Callable[[Mapping[str, object]], Mapping[str, object]]) -> Fields:
        """Return a copy whose values are the result of ``change``."""
        return Fields(change(self._values), self._source, self._prefix)

    def wrong(self, name: str, problem: str) -> ModelLoadError:
        """Return the error that the field ``name`` has ``problem``, for the caller to raise."""
        short = (
            problem if len(problem) <= _MAX_PROBLEM_CHARS else problem[:_MAX_PROBLEM_CHARS] + "..."
        )
        return ModelLoadError(f"{self._source}: {self._prefix}{name}: {short}")

    def get(self, name: str) -> object:
        """Return the field's value as it is; None if the field is absent or null."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def with_values(self, values: Mapping[str, object]) -> Fields:
        """Return a copy in which these fields are replaced or added."""
        return Fields({**self._values, **values}, self._source, self._prefix)

    def names(self) -> list[str]:
        """List the names of all fields."""
        return list(self._values)

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
    ) -> int:
        """Return an integer within the limits; the field is required if there is no default."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(name, f"expected an integer >= {minimum}, found {_shown(value)}")
        if value > maximum:
            raise self.wrong(name, f"expected an integer <= {maximum}, found {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, at most `MAX_NUMBER`; required if there is no default."""
        value = self._required(name, default)
        if not _is_number(value) or not 0 < value <= MAX_NUMBER:  # NaN fails, too
            raise self.wrong(name, f"expected a number > 0, found {_shown(value)}")
        return float(value)

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        """Return an integer, or None if the field is absent."""
        return self.integer(name, minimum=minimum) if self.has(name) else None

    def optional_number(self, name: str) -> float | None:
        """Return a number above 0, or None if the field is absent."""
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean; ``default`` if the field is absent, False if it is null."""
        value = self._values.get(name, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, f"expected true or false, found {_shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; the field is required if there is no default."""
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, f"expected a string, found {_shown(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings from a required field."""
        value = self._required(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, f"expected a list of strings, found {_shown(value)}")
        return tuple(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of exactly ``length`` numbers from a required field."""
        value = self._required(name, None)
        if not isinstance(value, list) or not all(map(_is_reckoned_with, value)):
            raise self.wrong(name, f"expected a list of numbers, found {_shown(value)}")
        if len(value) != length:
            raise self.wrong(name, f"expected {length} numbers, found {len(value)}")
        return tuple(float(item) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return a token id, or a list of token ids, as a tuple; empty if the field is absent."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.wrong(name, f"expected token ids, found {_shown(value)}")
        return tuple(ids)

    def child(self, name: str) -> Fields:
        """Return a required field's JSON object as ``Fields``."""
        value = self._required(name, None)
        if not isinstance(value, dict):
            raise self.wrong(name, f"expected an object, found {_shown(value)}")
        return Fields(value, self._source, f"{self._prefix}{name}.")

    def _required(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(name, "missing")
        return value


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_reckoned_with(value: object) -> bool:
    return _is_number(value) and abs(value) <= MAX_NUMBER


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
