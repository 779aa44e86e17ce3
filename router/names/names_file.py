"""NamesFile: a TOML file with one table per served name; read at start, written at each change.

["chat"]
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
request_defaults = "temperature=0.2,max_tokens=512"

["chat-legal"]
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
adapter = "3f5c..."
adapter_source = "legal"
pins_adapter = true
chat_template = "{{ messages[0].content }}"
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.api.bounded_files import parse_toml, read_text
from baton.api.errors import ConfigError
from router.names.base_model import BaseModel
from router.names.defaults import read_name_defaults
from router.names.served_name import ServedName

_PINS = "pins_adapter"  # the only key whose value is true or false; all others have texts
_KEYS = ("model", "adapter", "adapter_source", "request_defaults", "chat_template", _PINS)


class NamesFile:
    """The file that keeps a router's names.

    Args:
        path: the file; if it does not exist, the first change of a name creates it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, bases: Sequence[BaseModel]) -> list[ServedName]:
        """Return what each name in the file stands for; empty if the file does not exist yet.

        Args:
            bases: the router's base models. A table without ``model`` means the first one.

        Raises ConfigError naming the file, the name and the key.
        """
        if not self._path.exists():
            return []
        try:
            tables = parse_toml(read_text(self._path))
        except OSError as error:
            raise self._wrong(f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise self._wrong(str(error)) from error
        if not tables:
            raise self._wrong("has no name; remove the file to use the names of the options")
        return [self._read_name(name, table, bases) for name, table in tables.items()]

    def write(self, names: Iterable[ServedName]) -> None:
        """Replace the file's whole content by these names; raises ConfigError."""
        text = "\n".join(_table_of(one) for one in names)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._wrong(f"cannot be written: {error.strerror}") from error

    def _read_name(self, name: str, table: Any, bases: Sequence[BaseModel]) -> ServedName:
        if not isinstance(table, Mapping):
            raise self._wrong(f"{name}: must be a table, got a value")
        for key, value in table.items():
            if key not in _KEYS:
                raise self._wrong(f"[{name}] {key}: must be one of {', '.join(_KEYS)}")
            if not isinstance(value, bool if key == _PINS else str):
                kind = "true or false" if key == _PINS else "a text"
                raise self._wrong(f"[{name}] {key}: must be {kind}, got {value!r:.99}")
        model = table.get("model", bases[0].model)
        base = next((one for one in bases if one.model == model), None)
        if base is None:
            known = ", ".join(one.model for one in bases)
            raise self._wrong(f"[{name}] model: must be as in --model ({known}), got {model!r:.99}")
        try:
            return ServedName(
                name=name,
                base=base,
                adapter=table.get("adapter", ""),
                adapter_source=table.get("adapter_source", ""),
                pins_adapter=table.get(_PINS, False),
                defaults=read_name_defaults(table.get("request_defaults", "")),
                chat_template=table.get("chat_template", ""),
            )
        except ConfigError as error:
            raise self._wrong(f"[{name}] {error}") from None

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"names_file: {self._path}: {problem}")


def _table_of(one: ServedName) -> str:
    values = {
        "model": one.base.model,
        "adapter": one.adapter,
        "adapter_source": one.adapter_source,
        "request_defaults": one.defaults.text,
        "chat_template": one.chat_template,
    }
    lines = [f"{key} = {_quoted(value)}" for key, value in values.items() if value]
    lines += [f"{_PINS} = true"] if one.pins_adapter else []
    return "\n".join([f"[{_quoted(one.name)}]", *lines, ""])


def _quoted(text: str) -> str:
    """Return a text as a TOML string; JSON's quoting differs in one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
