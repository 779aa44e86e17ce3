"""Metrics of revisions, adapters, forecasts and scaling, computed when the metrics page is read."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
from router.fleet.load.forecast import RATIOS, PlaceForecasts
from router.fleet.node_pool import NodePool
from router.gate.scaling import ScalingSignals

PREFIX = "baton_router"
Source = TypeVar("Source")
# Maximum number of pairs of served name and adapter; then the pair that was used longest ago is
# dropped.
MAX_ADAPTERS = 1024


class Collected(Collector):
    """Collects the metrics that a function makes of an object, each time the page is read."""

    def __init__(self, collect: Callable[[Source], Iterable[Metric]], source: Source) -> None:
        self._collect = partial(collect, source)

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def make_family(
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """Make a metric family of the type that ``kind`` says.

    Args:
        samples: for each sample, a value for each label, and the number.
    """
    made = kind(f"{PREFIX}_{name}", text, labels=labels)
    for values, number in samples:
        made.add_metric(values, number)
    return made


def collect_revisions(pool: NodePool) -> Iterable[Metric]:
    """Collect the revisions of nodes and their shares of new requests."""
    fleet = pool.fleet  # `pool.fleet` updates the rollout, which is read below
    views = list(pool.rollout.view((node.load for node in pool.nodes), fleet))
    shares = (([view.name], view.share) for view in views)
    text = "Share of new requests that a revision of the nodes gets."
    yield make_family("revision_share", text, ["revision"], shares)
    counts = (
        ([view.name, role], num_nodes)
        for view in views
        for role, num_nodes in (("prefill", view.num_prefill), ("decode", view.num_decode))
    )
    text = "Nodes of a revision that may get requests."
    yield make_family("revision_nodes", text, ["revision", "role"], counts)


class AdapterCollector(Collector):
    """Collects how many tokens adapters computed, and how many nodes have each adapter in memory.

    Args:
        pool: the joined nodes; None: nodes are not counted.
    """

    def __init__(self, pool: NodePool | None) -> None:
        self._pool = pool
        self._used: OrderedDict[tuple[str, str], list[int]] = OrderedDict()  # (requests, tokens)

    def note_finished(self, receipt: Receipt) -> None:
        """Count a finished request under its served name and its adapter."""
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
        texts = {
            "adapter_requests": "Requests that finished with an adapter, by name.",
            "adapter_output_tokens": "Output tokens of these.",
        }
        for index, (name, text) in enumerate(texts.items()):
            samples = ((labels, counts[index]) for labels, counts in self._used.items())
            yield make_family(name, text, ["model", "adapter"], samples, CounterMetricFamily)
        nodes = self._pool.nodes if self._pool is not None else ()
        held = Counter(digest for node in nodes for digest in node.load.adapters)
        places = (([shorten_digest(key)], count) for key, count in held.most_common(MAX_ADAPTERS))
        yield make_family(
            "adapter_nodes", "Nodes that have an adapter in memory.", ["adapter"], places
        )


def collect_forecasts(forecasts: PlaceForecasts) -> Iterable[Metric]:
    """Collect histograms of the expected times of prompts divided by the measured times."""
    histogram = HistogramMetricFamily(
        f"{PREFIX}_prefill_forecast_ratio",
        "Expected over measured time of a prompt on its node: to compute it, and until its "
        "first token.",
        labels=["of", "place"],
    )
    for place, counted in (("pair", forecasts.pair), ("alone", forecasts.alone)):
        for of, ratios in (("compute", counted.compute), ("first_token", counted.first_token)):
            bounds = [*map(floatToGoString, RATIOS), "+Inf"]
            counts = itertools.accumulate(map(float, ratios.counts))
            buckets = list(zip(bounds, counts, strict=True))
            histogram.add_metric([of, place], buckets, ratios.total)
    yield histogram


def collect_scaling(signals: ScalingSignals) -> Iterable[Metric]:
    """Collect the scaling signals; a role without a usable node has no sample."""
    known = [(role.value, s) for role in NodeRole if (s := signals.signal(role)) is not None]
    pressures = (([role], signal.pressure) for role, signal in known)
    text = "How busy the busiest node of a role is; 1: as busy as one may be."
    yield make_family("scaling_pressure", text, ["role"], pressures)
    demands = (([role], signal.demand) for role, signal in known)
    text = "The same times the nodes: divided by the pressure that is wanted, the nodes to have."
    yield make_family("scaling_demand", text, ["role"], demands)
