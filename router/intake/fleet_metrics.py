"""Collectors of revisions, forecasts and scaling signals; they compute when metrics are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.link.words import NodeRole
from router.fleet.load.forecast import RATIOS, ForecastCounts
from router.fleet.node_pool import NodePool
from router.gate.scaling import ScalingSignals

_PREFIX = "baton_router"
Source = TypeVar("Source")


class Collected(Collector):
    """Collect the metric families that a function returns for its source, at each scrape."""

    def __init__(self, collect: Callable[[Source], Iterable[Metric]], source: Source) -> None:
        self._collect = partial(collect, source)

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def collect_revisions(pool: NodePool) -> Iterable[Metric]:
    """Collect the nodes' revisions and their shares of new requests."""
    share = GaugeMetricFamily(
        f"{_PREFIX}_revision_share",
        "Share of new requests that a revision of the nodes gets.",
        labels=["revision"],
    )
    nodes = GaugeMetricFamily(
        f"{_PREFIX}_revision_nodes",
        "Nodes of a revision that may get requests.",
        labels=["revision", "role"],
    )
    fleet = pool.fleet  # first, because making the fleet updates the rollout
    for view in pool.rollout.view((node.load for node in pool.nodes), fleet):
        share.add_metric([view.name], view.share)
        nodes.add_metric([view.name, "prefill"], view.num_prefill)
        nodes.add_metric([view.name, "decode"], view.num_decode)
    yield share
    yield nodes


def collect_forecasts(forecasts: ForecastCounts) -> Iterable[Metric]:
    """Collect how good the forecasts of prompts were: expected over measured time."""
    family = HistogramMetricFamily(
        f"{_PREFIX}_prefill_forecast_ratio",
        "Expected over measured time of a prompt on its node: to compute it, and until its "
        "first token.",
        labels=["of"],
    )
    for of, ratios in (("compute", forecasts.compute), ("first_token", forecasts.first_token)):
        bounds = [*map(floatToGoString, RATIOS), "+Inf"]
        counts = itertools.accumulate(map(float, ratios.counts))
        family.add_metric([of], list(zip(bounds, counts, strict=True)), ratios.total)
    yield family


def collect_scaling(signals: ScalingSignals) -> Iterable[Metric]:
    """Collect the scaling signals; no sample for a role without a serving node."""
    pressure = GaugeMetricFamily(
        f"{_PREFIX}_scaling_pressure",
        "How busy the busiest node of a role is; 1: as busy as one may be.",
        labels=["role"],
    )
    demand = GaugeMetricFamily(
        f"{_PREFIX}_scaling_demand",
        "The same times the nodes: divided by the pressure that is wanted, the nodes to have.",
        labels=["role"],
    )
    for role in NodeRole:
        signal = signals.signal(role)
        if signal is not None:
            pressure.add_metric([role.value], signal.pressure)
            demand.add_metric([role.value], signal.demand)
    yield pressure
    yield demand
