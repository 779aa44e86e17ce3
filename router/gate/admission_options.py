"""AdmissionOptions: how much work a router accepts."""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import check_limits, option

PREFILL_WINDOW_S = 0.5
SHARED_PREFILL_WINDOW_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """Limits of a router; 0 means no limit. Raises ConfigError naming the field."""

    max_queued_requests: int = option(
        4096,
        least=0,
        help="Requests that wait while the nodes have all that they can take; then the least "
        "urgent one of the tenant that waits for most, for its weight, is refused. 0: no limit.",
    )
    max_open_requests: int = option(
        0, least=0, help="Requests that wait or are in progress; 0: no limit."
    )
    max_open_requests_per_client: int = option(
        0,
        least=0,
        help="The same, of one API key that does not say it for itself; 0: no limit.",
    )
    max_ttft_s: float = option(
        0.0,
        least=0,
        help="A request whose first token is expected later than this is refused at once, "
        "seconds; 0: no limit but its deadline.",
    )
    prefill_window_s: float = option(
        PREFILL_WINDOW_S,
        least=0,
        help="Seconds of work that each prefill node may have before it; what is more waits in "
        "the router, by priority. More hides longer pauses of the router.",
    )
    shared_prefill_window_s: float = option(
        SHARED_PREFILL_WINDOW_S,
        least=0,
        help="The same while several tenants ask for something, of those that have much before "
        "the nodes already: what another tenant's next request may have to wait for.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
