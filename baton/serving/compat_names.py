"""VllmNames: exports metrics under vLLM's names, for dashboards and gateways made for vLLM.

Each metric is exported twice: with a colon in the name, as on vLLM's pages, and with an underscore,
as some dashboards expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_PREFIXES = ("vllm:", "vllm_")
_FINISHED = ("stop", "length", "abort")


class VllmNames(Collector):
    """Collector of metrics under vLLM's names.

    Args:
        families: yields pairs of a name, without prefix and ``_total``, and its metric family;
            called at each scrape.
        model: name of the served model, a label of each sample.
    """

    def __init__(self, families: Callable[[], Iterable[tuple[str, Metric]]], model: str) -> None:
        self._families = families
        self._labels = {"model_name": model, "engine": "0"}

    def describe(self) -> list[Metric]:
        return []  # registering a collector must not read metrics

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families():
            for prefix in _PREFIXES:
                yield self._renamed(family, prefix + name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix == "_created":
                continue
            labels = {**self._labels, **sample.labels}
            renamed.samples.append(Sample(name + suffix, labels, sample.value))
        return renamed


def finished_only(requests: Metric) -> Metric:
    """Return the numbers of finished requests by vLLM's label of the reason."""
    found = {
        sample.labels["outcome"]: sample.value
        for sample in requests.samples
        if sample.name.endswith("_total")
    }
    family = CounterMetricFamily(requests.name, requests.documentation, labels=["finished_reason"])
    for reason in _FINISHED:
        family.add_metric([reason], found.get(reason, 0.0))
    return family
