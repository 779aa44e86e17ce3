"""AdmissionOptions: how much a router takes on."""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.errors import ConfigError

PREFILL_WINDOW_S = 0.5
SHARED_PREFILL_WINDOW_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """Limits of a router; 0 is no limit.

    Attributes:
        max_queued_requests: that wait; then one is refused: of the tenant that waits for most, for
            its weight, the least urgent one.
        max_open_requests: that wait or are in progress.
        max_open_requests_per_client: the same, of one API key that does not say it for itself.
        max_ttft_s: a request whose first token is expected later is refused.
        prefill_window_s: seconds of work that each prefill node may have before it. More hides
            longer pauses of the router; less leaves more to the order of the queue.
        shared_prefill_window_s: the same while several tenants ask for something, of those that
            have much before the nodes already: who comes next waits for no more.
    """

    max_queued_requests: int = 4096
    max_open_requests: int = 0
    max_open_requests_per_client: int = 0
    max_ttft_s: float = 0.0
    prefill_window_s: float = PREFILL_WINDOW_S
    shared_prefill_window_s: float = SHARED_PREFILL_WINDOW_S

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: must be 0 or more, got {getattr(self, name):g}")
