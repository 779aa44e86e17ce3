"""MetricsPage: the text of `/metrics`, for one base model or several.

one base model     the model's metrics, unchanged
several            each sample of a base model has a label ``base_model``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.intake.metrics import RouterMetrics

LABEL = "base_model"


class MetricsPage:
    """Makes the metrics page of one router.

    Args:
        by_model: metrics of each base model, by its name; the first base model's metrics include
            those of the router itself.
    """

    def __init__(self, by_model: Mapping[str, RouterMetrics]) -> None:
        self._first = next(iter(by_model.values()))
        self._of_models: CollectorRegistry | None = None
        if len(by_model) > 1:
            self._of_models = CollectorRegistry()
            self._of_models.register(_LabelledMetrics(by_model))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        if self._of_models is None:
            return self._first.text()
        return generate_latest(self._first.of_router) + generate_latest(self._of_models)


class _LabelledMetrics(Collector):
    """Collects the metrics of several base models; labels each sample with its base model."""

    def __init__(self, by_model: Mapping[str, RouterMetrics]) -> None:
        self._by_model = by_model

    def describe(self) -> list[Metric]:
        return []  # registering a collector must not read metrics

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, metrics in self._by_model.items():
            for family in metrics.of_model.collect():
                empty = Metric(family.name, family.documentation, family.type)
                found = families.setdefault(family.name, empty)
                found.samples += [
                    sample._replace(labels={**sample.labels, LABEL: model})
                    for sample in family.samples
                ]
        return families.values()
