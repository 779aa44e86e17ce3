"""DecodeOptions: what only a decode node can be told. Nothing found at run time is stored here."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """Checked when made; raises ConfigError naming the option.

    Attributes:
        max_receiving_requests: most requests whose KV is on its way here at a time.
        max_receiving_tokens: most tokens whose KV is on its way here at a time; one request alone
            may have more. 0: half of the KV cache.
        local_prefill_threshold: a request of which the prefix cache has all but at most this many
            tokens is computed here and not received, if it can begin at once. 0: never.
    """

    max_receiving_requests: int = 64
    max_receiving_tokens: int = 0
    local_prefill_threshold: int = 32

    def __post_init__(self) -> None:
        for name, least in (
            ("max_receiving_requests", 1),
            ("max_receiving_tokens", 0),
            ("local_prefill_threshold", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}: must be {least} or more, got {value}")
