"""A real Prometheus scrapes a real fleet under load: each query of our dashboards has an answer,
and so has each of another engine's public ones, by its names."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from tests.fakes.outside.prometheus import NEEDS_PROMETHEUS, Prometheus, scraping, wait_for_targets
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until
from tools.dashboards import queries

pytestmark = [
    NEEDS_PROMETHEUS, pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300),
]  # fmt: skip

RULES = Path(__file__).parents[2] / "deploy" / "observability" / "rules.yaml"
COMPAT = ["--metrics-compat", "vllm", "--served-model-name", "demo"]
WINDOW = "15s"
# What vLLM's three public Grafana dashboards ask for: of histograms quantiles, means and heat maps;
# of counters rates; of gauges the value. One asks by names with colons, two with underscores.
HISTOGRAMS = (
    "e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "time_per_output_token_seconds", "request_time_per_output_token_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_max_num_generation_tokens", "iteration_tokens_total",
)  # fmt: skip
COUNTERS = (
    "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
)  # fmt: skip
GAUGES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
)  # fmt: skip


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes a fleet under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    with run_deployment(
        "--metrics-listen", "127.0.0.1:0", *COMPAT, http=True, router_args=COMPAT
    ) as running:
        config = running.config
        targets = {
            "baton-router": [config.http_listen],
            "baton-node": [page_of(running, name) for name in ("p0", "d0")],
        }
        with (
            scraping(targets, folder, free_address(), RULES) as prometheus,
            loading(config.listen),
        ):
            wait_for_targets(prometheus, 3)
            served = f"sum(increase(baton_router_requests_total[{WINDOW}])) > 5"
            wait_until(lambda: prometheus.query(served), "requests", timeout_s=60)
            yield prometheus


def page_of(running: LocalDeployment, name: str) -> str:
    log = running.child(name).log.read_text(encoding="utf-8")
    return str(re.findall(r"metrics at http://(\S+)/metrics", log)[-1])


class loading:  # a context manager
    """Requests, two at a time, until it is left."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(2)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with Client(self._address) as client:
            while not self._over.is_set():
                number += 2
                prompt = [5, 6, 7, 10 + number % 1000] * 20
                client.generate(prompt, SamplingParams(max_tokens=16, ignore_eos=True))


def test_each_query_of_our_dashboards_has_an_answer(prometheus: Prometheus) -> None:
    asked = []
    for _, query in queries():
        filled = query.replace("$__rate_interval", WINDOW).replace("$router_job", "baton-router")
        asked.append(re.sub(r"\$(role|node)", ".*", filled))
        assert "$" not in asked[-1]
    assert_answered(prometheus, asked)


def assert_answered(prometheus: Prometheus, asked: list[str]) -> None:
    """Soon: a rate needs two scrapes amid the load."""
    left = asked
    give_up_at = time.monotonic() + 30
    while left := [query for query in left if not prometheus.query(query)]:
        assert time.monotonic() < give_up_at, left
        time.sleep(0.5)


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
def test_each_query_by_another_engine_s_names_has_an_answer(
    prometheus: Prometheus, prefix: str
) -> None:
    of_model = '{model_name=~"demo"}'
    asked = [f"{prefix}{name}{of_model}" for name in GAUGES]
    asked += [f"sum(rate({prefix}{name}{of_model}[{WINDOW}]))" for name in COUNTERS]
    asked += [f"sum by (finished_reason) (increase({prefix}request_success_total[{WINDOW}]))"]
    for name in HISTOGRAMS:
        metric = f"{prefix}{name}"
        asked += [
            f"histogram_quantile(0.9, sum by (le) (rate({metric}_bucket{of_model}[{WINDOW}])))",
            f"rate({metric}_sum{of_model}[{WINDOW}]) / rate({metric}_count{of_model}[{WINDOW}])",
            f"sum by (le) (increase({metric}_bucket{of_model}[{WINDOW}]))",
        ]
    assert_answered(prometheus, asked)
    # And they are the numbers of ours.
    for theirs, ours in (
        (f"{prefix}generation_tokens_total", "baton_router_output_tokens_total"),
        (f"{prefix}e2e_request_latency_seconds_count", "baton_router_request_seconds_count"),
        (f'sum({prefix}request_success_total{{finished_reason="length"}})',
         'sum(baton_router_requests_total{outcome="length"})'),
    ):  # fmt: skip
        (found,) = prometheus.query(f"({theirs}) - on () ({ours})")
        assert found["value"][1] == "0"


def test_the_pages_are_well_formed_and_no_alert_fires(prometheus: Prometheus) -> None:
    for target in prometheus.query("up"):
        address = target["metric"]["instance"]
        page = subprocess.run(
            ["curl", "--silent", f"http://{address}/metrics"], capture_output=True, check=True
        ).stdout
        ours = b"".join(line for line in page.splitlines(True) if b"vllm" not in line)
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=ours, capture_output=True, check=False
        )
        problems = checked.stderr.decode() + checked.stdout.decode()
        assert checked.returncode in (0, 3), problems
        assert "error" not in problems.lower(), problems
    assert prometheus.firing() == set()
