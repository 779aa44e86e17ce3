"""Unit tests of the metrics page: one base model's metrics as they are, several with a label."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from baton.api.outputs import FinishReason, TextDelta
from router.gate.overload import Overload
from router.intake.metrics import RouterMetrics
from router.names.metrics_page import MetricsPage
from tests.fakes.router.nodes import make_pool
from tests.unit.router.intake.test_metrics import RECEIPT


def finished(metrics: RouterMetrics, number: int) -> RouterMetrics:
    for _ in range(number):
        with metrics.running() as record:
            record.on_last_delta(TextDelta("a", 4, (1,), "x", FinishReason.STOP, RECEIPT))
    return metrics


def test_one_base_model_has_its_metrics_without_a_label() -> None:
    metrics = finished(RouterMetrics(make_pool(), overload=Overload()), 1)
    assert 'baton_router_requests_total{outcome="stop"} 1.0' in metrics.text().decode()
    assert b"base_model" not in MetricsPage({"a": metrics}).text()


def test_several_base_models_have_one_family_with_a_label_and_the_routers_metrics_once() -> None:
    a = finished(RouterMetrics(make_pool(), overload=Overload()), 2)
    b = finished(RouterMetrics(make_pool()), 3)
    text = MetricsPage({"a": a, "b": b}).text().decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))  # or Prometheus refuses the page
    found = {
        (sample.name, sample.labels.get("base_model"), sample.labels.get("outcome")): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["baton_router_requests_total", "a", "stop"] == 2
    assert found["baton_router_requests_total", "b", "stop"] == 3
    assert found["baton_router_time_to_first_token_seconds_count", "b", None] == 3
    assert ("process_open_fds", None, None) in found
    assert found["baton_router_overload_level", None, None] == 0
