"""Collectors of revisions, forecasts and scaling signals; they compute when metrics are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.link.words import NodeRole
from router.fleet.load.forecast import RATIOS, ForecastCounts
from router.fleet.node_pool import NodePool
from router.gate.scaling import ScalingSignals

_PREFIX = "baton_router"


class RevisionCollector(Collector):
    """Collect the nodes' revisions and their shares of new requests."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
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
        fleet = self._pool.fleet  # first, because making the fleet updates the rollout
        for view in self._pool.rollout.view((node.load for node in self._pool.nodes), fleet):
            share.add_metric([view.name], view.share)
            nodes.add_metric([view.name, "prefill"], view.num_prefill)
            nodes.add_metric([view.name, "decode"], view.num_decode)
        yield share
        yield nodes


class ForecastCollector(Collector):
    """Collect how good the forecasts of prompts were, as expected over measured time."""

    def __init__(self, forecasts: ForecastCounts) -> None:
        self._forecasts = forecasts

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(
            f"{_PREFIX}_prefill_forecast_ratio",
            "Expected over measured time of a prompt on its node: to compute it, and until its "
            "first token.",
            labels=["of"],
        )
        forecasts = self._forecasts
        for of, ratios in (("compute", forecasts.compute), ("first_token", forecasts.first_token)):
            bounds = [*map(floatToGoString, RATIOS), "+Inf"]
            counts = itertools.accumulate(map(float, ratios.counts))
            family.add_metric([of], list(zip(bounds, counts, strict=True)), ratios.total)
        yield family


class ScalingCollector(Collector):
    """Collect the scaling signals; a role without serving nodes has no sample."""

    def __init__(self, signals: ScalingSignals) -> None:
        self._signals = signals

    def collect(self) -> Iterable[Metric]:
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
            signal = self._signals.signal(role)
            if signal is not None:
                pressure.add_metric([role.value], signal.pressure)
                demand.add_metric([role.value], signal.demand)
        yield pressure
        yield demand
