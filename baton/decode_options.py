"""DecodeOptions: what only a decode node can be told. Nothing found at run time is stored here."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """Checked when made; raises ConfigError naming the option.

    Attributes:
        max_receiving_requests: most requests whose KV is on its way here at a time.
        max_receiving_tokens: most tokens whose KV is on its way here at a time; one request alone
            may have more. 0: half of the KV cache.
    """

    max_receiving_requests: int = 64
    max_receiving_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_receiving_requests", 1), ("max_receiving_tokens", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}: must be {least} or more, got {value}")
