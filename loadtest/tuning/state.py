"""TuningState: the trials of a search in a file, so that an interrupted search can go on.

The first line names the search (model, load, SLO, arguments, version). Each further line is one
trial, and is written when the trial ends. A line that was cut off by a crash is dropped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.api.bounded_files import MAX_DATA_BYTES, parse_json, read_text
from baton.api.errors import ConfigError, reason_of
from loadtest.tuning.settings import Choice
from loadtest.tuning.tune import Trial

_BEGIN = '{"search": '  # beginning of every state file


class TuningState:
    """The trials of one search, read from a file if the file exists.

    Args:
        search: what the trials depend on; a file of another search is refused.

    Attributes:
        seed: seed of the requests: the file's, so that a resumed search sends the same requests.
    """

    def __init__(self, path: Path, search: Mapping[str, Any], seed: int) -> None:
        self._path = path
        self.seed = seed
        self._trials: dict[str, Trial] = {}
        try:
            text = read_text(path, MAX_DATA_BYTES) if path.exists() else ""
        except (OSError, ValueError) as error:
            raise ConfigError(f"state: {path} cannot be read: {reason_of(error)}") from error
        whole = text[: text.rfind("\n") + 1]
        try:
            if not text.startswith(_BEGIN[: len(text)]):
                raise ValueError("is no file of a search")
            self._read(whole.splitlines(), search)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"state: {path}: {reason_of(error)}; remove it, or name another --state"
            ) from error
        try:
            if not whole:
                head = {"search": dict(search), "seed": seed}
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            elif whole != text:
                path.write_text(whole, encoding="utf-8")
        except OSError as error:
            raise _not_written(path, error) from error

    @property
    def num_trials(self) -> int:
        """Return the number of trials in the file."""
        return len(self._trials)

    def find(self, choice: Choice, repeat: int) -> Trial | None:
        """Return the trial of this choice and repeat, or None if it has not been run."""
        return self._trials.get(_key(choice, repeat))

    def add(self, trial: Trial) -> None:
        """Note a trial, and write it to the file; raises ConfigError if it cannot be written."""
        self._trials[_key(trial.choice, trial.repeat)] = trial
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(trial)) + "\n")
        except OSError as error:
            raise _not_written(self._path, error) from error

    def _read(self, lines: list[str], search: Mapping[str, Any]) -> None:
        if not lines:
            return
        head: Any = parse_json(lines[0])
        if not isinstance(head, dict) or not isinstance(head.get("seed"), int):
            raise ValueError("is no file of a search")
        for name, value in search.items():
            if head.get("search", {}).get(name) != value:
                raise ValueError(f"is of another search, with another {name}")
        self.seed = head["seed"]
        for line in lines[1:]:
            fields: Any = parse_json(line)
            trial = Trial(**fields)
            if not isinstance(trial.goodput_per_s, int | float):
                raise ValueError("has a line that is no trial")
            self._trials[_key(trial.choice, trial.repeat)] = trial


def _not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"state: {path} cannot be written: {reason_of(error)}")


def _key(choice: Choice, repeat: int) -> str:
    return json.dumps([sorted(choice.items()), repeat])
