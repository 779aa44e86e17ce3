"""What the router's page says of revisions and of how busy each role is: looked at when asked."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.link.words import NodeRole
from router.fleet.node_pool import NodePool
from router.gate.scaling import ScalingSignals

_PREFIX = "baton_router"


class RevisionCollector(Collector):
    """Revisions of nodes, and the shares of new requests that they get."""

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
        fleet = self._pool.fleet  # first: what is told of revisions is told of the last fleet
        for view in self._pool.rollout.view((node.load for node in self._pool.nodes), fleet):
            share.add_metric([view.name], view.share)
            nodes.add_metric([view.name, "prefill"], view.num_prefill)
            nodes.add_metric([view.name, "decode"], view.num_decode)
        yield share
        yield nodes


class ScalingCollector(Collector):
    """How busy the nodes of a role are; no sample where there is no node that could say it."""

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
