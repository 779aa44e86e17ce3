"""ScalingOptions: targets for the scaling signals."""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import check_limits, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """Latency targets that decide how many nodes are needed."""

    scaling_ttft_s: float = option(
        2.0,
        above=0,
        help="For the scaling signal of prefill nodes: a prompt's wait for its turn at which "
        "another node is wanted, seconds.",
    )
    scaling_itl_s: float = option(
        0.05,
        above=0,
        help="For the scaling signal of decode nodes: length of a step at which another node is "
        "wanted, seconds.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
