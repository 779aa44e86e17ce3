"""Read untrusted files within limits of size and nesting; refuse pipes and devices.

Knows no field of these files.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from baton.api.errors import ConfigError, ModelLoadError

# Limit of JSON files; the largest known files are tokenizers of 35 MB and indices of 10 MB.
MAX_JSON_BYTES = 256 * 2**20
MAX_DEPTH = 64
MAX_TEXT_BYTES = 16 * 2**20  # limit of text files that people write
MAX_DATA_BYTES = 4 * 2**30  # limit of files with prompts or traces of requests
_MAX_SHOWN_CHARS = 300


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object.

    Raises:
        ModelLoadError: the file cannot be read, is not a JSON object, or exceeds a limit.
    """
    content = read_file(path)
    try:
        return parse_object(content)
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def read_file(
    path: Path, max_bytes: int = MAX_JSON_BYTES, error_type: type[ConfigError] = ModelLoadError
) -> bytes:
    """Read a regular file; refuse pipes, devices and files above ``max_bytes``.

    Raises:
        ConfigError: the file cannot be read or is too long; the class is ``error_type``.
    """
    size = size_of(path, error_type)
    if size > max_bytes:
        raise error_type(f"{path}: must have at most {max_bytes} bytes, got {size}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror or error}") from error


def size_of(path: Path, error_type: type[ConfigError] = ModelLoadError) -> int:
    """Return a regular file's size in bytes; raises ``error_type`` for any other file.

    Other files are refused because opening a pipe may block, and reading a device may never end.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: the path has a null byte
        why = getattr(error, "strerror", None) or error
        raise error_type(f"{path}: cannot be read: {why}") from error
    if not stat.S_ISREG(found.st_mode):
        raise error_type(f"{path}: cannot be read: not a regular file")
    return found.st_size


def refuse_devices(path: Path) -> None:
    """Raise ConfigError for a device, because a file such as /dev/zero never ends."""
    if path.is_char_device() or path.is_block_device():
        raise ConfigError(f"{path}: cannot be read: a device")


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a text file or pipe that an operator gives, up to a limit.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has more than ``max_bytes``, or is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"must have at most {max_bytes} bytes")
    return content.decode()


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError with a one-line message."""
    import tomllib  # imported here: most commands do not read TOML

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too many levels") from None
    except ValueError as error:  # TOMLDecodeError, or a number of more than 4,300 digits
        raise ValueError(str(error)[:_MAX_SHOWN_CHARS]) from None


def parse_json(text: str) -> Any:
    """Parse JSON; raises ValueError with a one-line message."""
    try:
        return json.loads(text, parse_constant=_read_constant)
    except RecursionError:
        raise ValueError(f"not valid JSON: more than {MAX_DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError, or a number of more than 4,300 digits
        raise ValueError(f"not valid JSON: {str(error)[:_MAX_SHOWN_CHARS]}") from None


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object; raises ValueError with a one-line message."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    found = parse_json(text)
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise ValueError(f"expected a JSON object, found {kind}")
    _check_depth(found)
    return found


def _read_constant(name: str) -> float:
    """Return infinity, which transformers writes to JSON as a limit; raise ValueError for NaN."""
    if name == "NaN":
        raise ValueError(f"{name} is no JSON")
    return float(name)


def _check_depth(value: dict[str, Any]) -> None:
    """Raise ValueError if a value has so many levels that recursive code could fail."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for parts in level
            for part in (parts.values() if isinstance(parts, dict) else parts)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"not valid JSON: more than {MAX_DEPTH} levels")
