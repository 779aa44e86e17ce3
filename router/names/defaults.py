"""NameDefaults: request defaults of one served name, and the option that sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.api.errors import ConfigError, InvalidRequestError
from baton.api.sampling_params import SamplingParams

_WHOLE = ("top_k", "max_tokens", "max_tokens_limit")
_KEYS = ("temperature", "top_p", "min_p", "repetition_penalty", *_WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameDefaults:
    """Defaults of requests under one name.

    Attributes:
        sampling: value of each `SamplingParams` field that has a default here; these defaults
            override the checkpoint's.
        max_tokens: maximum number of output tokens of requests that set none; None: the API's
            default applies.
        max_tokens_limit: upper limit of every request's output tokens; None: no limit.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    max_tokens_limit: int | None = None

    @property
    def text(self) -> str:
        """The text from which `read_name_defaults` reads these defaults; empty: no defaults."""
        limits = {"max_tokens": self.max_tokens, "max_tokens_limit": self.max_tokens_limit}
        given = {**self.sampling, **{key: one for key, one in limits.items() if one is not None}}
        return ",".join(f"{key}={value:.12g}" for key, value in given.items())

    def num_tokens(self, asked: int | None, otherwise: int) -> int:
        """Return the maximum number of output tokens of a request.

        Args:
            asked: number that the request asks for; None: it asks for none.
            otherwise: the API's default.
        """
        found = asked if asked is not None else self.max_tokens
        found = otherwise if found is None else found
        return found if self.max_tokens_limit is None else min(found, self.max_tokens_limit)


NO_DEFAULTS = NameDefaults()


def read_names(name: str, aliases: str) -> tuple[str, ...]:
    """Return all names of the model: ``name``, and the aliases divided by commas."""
    others = (one.strip() for one in aliases.split(","))
    return tuple(dict.fromkeys([name, *filter(None, others)]))


def read_defaults(names: tuple[str, ...], text: str) -> dict[str, NameDefaults]:
    """Read the defaults of each name from ``[NAME:]key=value,...;...``; raises ConfigError.

    An entry without a name applies to all names.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for part in filter(str.strip, text.split(";")):
        before, sign, behind = part.partition("=")
        name, _, first = before.rpartition(":")
        if not sign or (name and name.strip() not in given):
            raise _wrong(f"must be NAME:key=value with a served NAME, got {part.strip()!r}")
        read = _values(f"{first}={behind}")
        for one in [name.strip()] if name else names:
            given[one].update(read)
    return {name: _defaults(values) for name, values in given.items()}


def read_name_defaults(text: str) -> NameDefaults:
    """Read one name's defaults from ``key=value,...``; raises ConfigError."""
    return _defaults(_values(text)) if text.strip() else NO_DEFAULTS


def _values(text: str) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = (one.strip() for one in item.partition("="))
        if key not in _KEYS:
            raise _wrong(f"must have keys of {', '.join(_KEYS)}, got {key!r}")
        try:
            read[key] = int(value) if key in _WHOLE else float(value)
        except ValueError:
            raise _wrong(f"{key} must be a number, got {value!r}") from None
    return read


def _defaults(values: dict[str, Any]) -> NameDefaults:
    limits = {key: values.pop(key) for key in ("max_tokens", "max_tokens_limit") if key in values}
    try:
        SamplingParams(**values)
        for value in limits.values():
            SamplingParams(max_tokens=value)
    except InvalidRequestError as error:
        raise _wrong(str(error)) from None
    return NameDefaults(sampling=values, **limits)


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"request_defaults: {problem}")
