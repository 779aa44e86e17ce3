"""AdmissionOptions: how many requests may wait or run, and how long they may wait."""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import check_limits, option

PREFILL_WINDOW_S = 0.5
SHARED_PREFILL_WINDOW_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """Limits of a router's gate; 0 means no limit. A wrong value raises ConfigError."""

    max_queued_requests: int = option(
        4096,
        least=0,
        help="Most requests that wait while the nodes are full; 0: no limit. When one more comes, "
        "the tenant with the most waiting work for its weight loses its least urgent request.",
    )
    max_open_requests: int = option(
        0, least=0, help="Most requests that wait or are in progress; 0: no limit."
    )
    max_open_requests_per_client: int = option(
        0,
        least=0,
        help="Most open requests (waiting or in progress) of one API key that sets no limit "
        "itself; 0: no limit.",
    )
    max_hints_per_minute: int = option(
        6000,
        least=0,
        help="Most hints about sessions (prefetches and drops) per minute of one API key, or of "
        "all clients without keys; 0: no limit. The router sends a hint to the nodes that may "
        "know the session; if it knows none, to all nodes of the model.",
    )
    max_ttft_s: float = option(
        0.0,
        least=0,
        help="A request whose first token is expected later than this is refused at once, "
        "seconds; 0: only its deadline limits it.",
    )
    prefill_window_s: float = option(
        PREFILL_WINDOW_S,
        least=0,
        help="Most work queued at each prefill node, seconds; other requests wait in the router, "
        "by priority. A larger window hides longer pauses of the router.",
    )
    shared_prefill_window_s: float = option(
        SHARED_PREFILL_WINDOW_S,
        least=0,
        help="Replaces --prefill-window-s, while several tenants send requests, for tenants with "
        "much work queued at nodes, seconds. It bounds how long another tenant's next request "
        "waits for that work.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
