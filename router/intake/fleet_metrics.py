"""Collectors for revisions, adapters, forecasts and scaling, evaluated when metrics are read."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.adapters.digest import shorten_digest
from baton.api.outputs import Receipt
from baton.link.words import NodeRole
from router.fleet.load.forecast import RATIOS, ForecastCounts
from router.fleet.node_pool import NodePool
from router.gate.scaling import ScalingSignals

_PREFIX = "baton_router"
Source = TypeVar("Source")
MAX_ADAPTERS = 1024  # most pairs of a name and an adapter; those used longest ago leave the page


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


class AdapterCollector(Collector):
    """Collect what adapters computed, and how many nodes have each one in memory.

    Args:
        pool: has the nodes; None: there are none.
    """

    def __init__(self, pool: NodePool | None) -> None:
        self._pool = pool
        self._used: OrderedDict[tuple[str, str], list[int]] = OrderedDict()  # requests and tokens

    def note_finished(self, receipt: Receipt) -> None:
        """Count a finished request by its name and adapter."""
        if not receipt.adapter:
            return
        key = receipt.model, shorten_digest(receipt.adapter)
        counts = self._used.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += receipt.num_output_tokens
        self._used.move_to_end(key)
        if len(self._used) > MAX_ADAPTERS:
            self._used.popitem(last=False)

    def collect(self) -> Iterable[Metric]:
        families = [
            CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["model", "adapter"])
            for name, text in (
                ("adapter_requests", "Requests that finished with an adapter, by name."),
                ("adapter_output_tokens", "Output tokens of these."),
            )
        ]
        for labels, counts in self._used.items():
            for family, count in zip(families, counts, strict=True):
                family.add_metric(labels, count)
        yield from families
        yield self._places()

    def _places(self) -> Metric:
        family = GaugeMetricFamily(
            f"{_PREFIX}_adapter_nodes",
            "Nodes that have an adapter in memory.",
            labels=["adapter"],
        )
        nodes = self._pool.nodes if self._pool is not None else ()
        held = Counter(digest for node in nodes for digest in node.load.adapters)
        for digest, count in held.most_common(MAX_ADAPTERS):
            family.add_metric([shorten_digest(digest)], count)
        return family


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
