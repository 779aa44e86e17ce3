"""ScalingOptions: the target latencies behind the scaling signals."""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import check_limits, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """Target latencies; an autoscaler adds nodes when the latencies exceed them."""

    scaling_ttft_s: float = option(
        2.0,
        above=0,
        help="Scaling signal of prefill nodes: another node is wanted when a prompt waits this "
        "long for its turn, seconds.",
    )
    scaling_itl_s: float = option(
        0.05,
        above=0,
        help="Scaling signal of decode nodes: another node is wanted when a step takes this long, "
        "seconds.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
