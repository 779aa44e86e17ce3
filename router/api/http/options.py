"""HttpOptions: what an operator says of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP API; see `baton router --help`.

    Attributes:
        model_name: what clients call the model.
        strict_fields: a field that has no effect is an error.
    """

    model_name: str
    strict_fields: bool = False
