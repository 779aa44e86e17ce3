"""Data sets: reads conversations from files in formats that other load generators also read.

    ShareGPT   [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", ...}]}, ...]
    turns      {"session_id": "a", "turns": [{"text": "Hi", "delay": 500}, {"text": "And?"}]}
    messages   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}]}
    plain      {"prompt": "Once upon", "output_tokens": 20}

A file is one JSON array, or has one object per line (JSONL). The fields of an object show its
format. Refuses to know: servers, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.bounded_files import MAX_DATA_BYTES, parse_json, read_text, refuse_devices
from baton.api.errors import ConfigError, reason_of
from loadtest.load.prompts import Message

# Names of the field with the prompt, and of the field with the output's length; the first name that
# an object has counts.
PROMPT_FIELDS = ("prompt", "text", "text_input", "input", "question", "instruction")
LENGTH_FIELDS = (
    "output_length", "output_tokens", "output_tokens_count", "completion_tokens_count",
    "max_tokens",
)  # fmt: skip
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "bot": "assistant", "system": "system",
}  # fmt: skip
_MOST_OUTPUT = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetTurn:
    """A question of a conversation, and the answer that the data set has recorded.

    Attributes:
        messages: the messages since the previous answer, of which the last is the question.
        answer: the recorded answer. The next turn's prompt repeats this answer, and not the
            server's; empty: none was recorded.
        output_length: wanted output length in tokens; None: the data set gives none.
        pause_s: seconds between the previous answer and this question; None: the data set gives
            none.
    """

    messages: tuple[Message, ...]
    answer: str = ""
    output_length: int | None = None
    pause_s: float | None = None


Conversation = tuple[DatasetTurn, ...]


def read_dataset(path: Path) -> list[Conversation]:
    """Read all conversations that contain a question, in the file's order.

    Raises:
        ConfigError: the file is unreadable, an entry has no known format, or no entry has a
            question.
    """
    refuse_devices(path)
    try:
        text = read_text(path, MAX_DATA_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset: {path} cannot be read: {reason_of(error)}") from error
    found = []
    for where, entry in _entries(path, text):
        try:
            conversation = _conversation(entry)
        except ValueError as error:
            raise ConfigError(f"dataset: {path}, {where}: {error}") from error
        if conversation:
            found.append(conversation)
    if not found:
        raise ConfigError(f"dataset: {path} has no prompt in it")
    return found


def _entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each entry's place in the file, for errors, and the entry; raises ConfigError."""
    if text.lstrip()[:1] == "[":
        try:
            entries = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"dataset: {path}: {error}") from error
        for number, entry in enumerate(entries, start=1):
            yield f"entry {number}", entry
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"dataset: {path}, line {number}: {error}") from error
        yield f"line {number}", entry


def _conversation(entry: Any) -> Conversation:
    """Read one conversation, which is empty without a question; raises ValueError."""
    if isinstance(entry, dict):
        for name, read in _KINDS.items():
            if name in entry:
                return read(entry[name])
        if _first(entry, PROMPT_FIELDS) is not None:
            return (_plain_turn(entry, role=""),)
    raise ValueError(
        f"must be an object with {', '.join(_KINDS)} or one of {', '.join(PROMPT_FIELDS)}"
    )


def _plain_turn(entry: Any, role: str) -> DatasetTurn:
    text = entry if isinstance(entry, str) else None
    length = pause_ms = None
    if isinstance(entry, dict):
        text = _first(entry, PROMPT_FIELDS)
        length, pause_ms = _first(entry, LENGTH_FIELDS), entry.get("delay")
    if not isinstance(text, str) or not text:
        raise ValueError(f"{PROMPT_FIELDS[0]}: must be a text, got {text!r:.100}")
    if length is not None and not (type(length) is int and 1 <= length <= _MOST_OUTPUT):
        raise ValueError(f"{LENGTH_FIELDS[0]}: must be 1 to {_MOST_OUTPUT}, got {length!r}")
    if pause_ms is not None and not (
        isinstance(pause_ms, int | float) and not isinstance(pause_ms, bool) and pause_ms >= 0
    ):
        raise ValueError(f"delay: must be milliseconds, 0 or more, got {pause_ms!r}")
    return DatasetTurn(
        messages=(Message(role, text),),
        output_length=length,
        pause_s=None if pause_ms is None else pause_ms / 1e3,
    )


def _turns(turns: Any) -> Conversation:
    if not isinstance(turns, list):
        raise ValueError(f"turns: must be a list, got {type(turns).__name__}")
    return tuple(_plain_turn(turn, role="user") for turn in turns)


def _messages(role_field: str, text_field: str) -> Callable[[Any], Conversation]:
    """Make a function that reads messages whose role and text are in these fields."""

    def read(messages: Any) -> Conversation:
        if not isinstance(messages, list):
            raise ValueError(f"must be a list of messages, got {type(messages).__name__}")
        turns: list[DatasetTurn] = []
        new: list[Message] = []
        for one in messages:
            said = one.get(text_field) if isinstance(one, dict) else None
            role = _ROLES.get(str(one.get(role_field)).lower()) if isinstance(one, dict) else None
            if role is None or not isinstance(said, str):
                raise ValueError(
                    f"a message must have a {text_field} and a {role_field} of "
                    f"{', '.join(_ROLES)}, got {str(one)[:80]!r}"
                )
            if role == "assistant" and any(message.role == "user" for message in new):
                turns.append(DatasetTurn(messages=tuple(new), answer=said))
                new = []
            elif role != "assistant":  # an answer at the start of a chat is left out
                new.append(Message(role, said))
        if any(message.role == "user" for message in new):
            turns.append(DatasetTurn(messages=tuple(new)))
        return tuple(turns)

    return read


_KINDS: dict[str, Callable[[Any], Conversation]] = {
    "conversations": _messages("from", "value"),
    "messages": _messages("role", "content"),
    "turns": _turns,
}


def _first(entry: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((entry[name] for name in names if entry.get(name) is not None), None)
