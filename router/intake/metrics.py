"""RouterMetrics: the router's metrics for Prometheus. Requests are counted when they end.

Names follow Prometheus' rules: counters end in ``_total``, times are in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from baton.api.errors import BatonError, status_name
from baton.api.outputs import Receipt, TextDelta
from baton.link.words import NodeRole
from baton.serving.compat_names import VllmNames, finished_only
from baton.serving.connection_limits import ConnectionCounts
from router.calls.recovery.suspects import Suspects
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission
from router.gate.overload import Overload
from router.intake.fleet_metrics import (
    PREFIX,
    AdapterCollector,
    Collected,
    collect_forecasts,
    collect_revisions,
    make_family,
)

# Maximum number of pairs of nodes on the page: listing all would block the event loop
MAX_PAIRS = 2048
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUEUE_S = (0.001, 0.0025, 0.005, *_TTFT_S)
_NUM_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_NODE_STATES = ("ready", "joined", "draining", "ejected", "not_serving", "lost")


# Name, help text and buckets of each histogram of finished requests.
_OF_REQUEST = (
    (
        "time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_S,
    ),
    (
        "inter_token_latency_seconds",
        "Mean time between a request's tokens; one observation per request.",
        _TOKEN_S,
    ),
    ("request_seconds", "From a request's arrival to its last token.", _REQUEST_S),
    (
        "queue_seconds",
        "From a request's arrival until its prefill began, at the router and on the node.",
        _QUEUE_S,
    ),
    ("prefill_seconds", "From a request's first chunk to its first token.", _TTFT_S),
    ("decode_seconds", "From a request's first token to its last one.", _REQUEST_S),
    (
        "exposed_transfer_seconds",
        "From token 1's being sampled until all writes of KV were complete.",
        _QUEUE_S,
    ),
    ("first_step_seconds", "From complete KV to the decode node's first token.", _QUEUE_S),
    ("request_prompt_tokens", "Prompt tokens of a request.", _NUM_TOKENS),
    ("request_output_tokens", "Output tokens of a request.", _NUM_TOKENS),
)  # fmt: skip


_VLLM_NAMES_OF_REQUESTS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    # The older name that vLLM gave to the metric.
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "request_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_output_tokens",
    "request_max_num_generation_tokens": "request_output_tokens",
}


class RequestRecord:
    """The outcome of one request, which `RouterMetrics.running` counts."""

    def __init__(self) -> None:
        self.outcome = "cancelled"
        self.receipt: Receipt | None = None

    def on_last_delta(self, delta: TextDelta) -> None:
        """Note the outcome of a request from its last delta, before the client gets the delta."""
        assert delta.finish_reason is not None
        self.outcome = delta.finish_reason.value
        self.receipt = delta.receipt


class RouterMetrics:
    """All metrics of one router, in registries of their own.

    Args:
        pool: the nodes to describe when the page is read.
        admission: the gate to describe.
        overload: the overload state to describe.
        suspects: the quarantined requests to describe.

    Attributes:
        of_router: metrics of the router's process, its overload and its connections.
        of_model: all other metrics, which concern one base model.
    """

    def __init__(
        self,
        pool: NodePool | None = None,
        admission: Admission | None = None,
        overload: Overload | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self.of_router = CollectorRegistry()
        registry = self.of_model = CollectorRegistry()
        ProcessCollector(registry=self.of_router)
        self._admission = admission
        self._requests = Counter(
            f"{PREFIX}_requests",
            "Requests that ended: stop, length, abort, cancelled, or the error's status.",
            ["outcome"],
            registry=registry,
        )
        self._open = Gauge(f"{PREFIX}_requests_open", "Requests in progress.", registry=registry)
        self._tokens = {
            kind: Counter(f"{PREFIX}_{kind}_tokens", text, registry=registry)
            for kind, text in (
                ("prompt", "Prompt tokens of requests that finished."),
                ("cached_prompt", "Prompt tokens of finished requests found in a prefix cache."),
                ("output", "Output tokens of requests that finished."),
            )
        }
        self._images = {
            name: Counter(f"{PREFIX}_{name}", text, registry=registry)
            for name, text in (
                ("images", "Images in prompts of requests that finished."),
                ("image_tokens", "Prompt tokens of the images of requests that finished."),
            )
        }
        self._attempts = Counter(
            f"{PREFIX}_attempts", "Attempts of requests that finished.", registry=registry
        )
        self._of_request = {
            name: Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=registry)
            for name, text, buckets in _OF_REQUEST
        }
        self._adapters = AdapterCollector(pool)
        registry.register(self._adapters)
        if pool is not None:
            registry.register(Collected(_collect_nodes, pool))
            registry.register(Collected(_collect_pairs, pool))
            registry.register(Collected(_collect_index, pool))
            registry.register(Collected(collect_revisions, pool))
            registry.register(Collected(collect_forecasts, pool.forecasts))
        if admission is not None:
            registry.register(Collected(_collect_admission, admission))
        if overload is not None:
            self.of_router.register(Collected(_collect_overload, overload))
        if suspects is not None:
            registry.register(Collected(_collect_suspects, suspects))

    def show_connections(self, counts: ConnectionCounts) -> None:
        """Add metrics of the HTTP connections to the page."""
        self.of_router.register(Collected(_collect_connections, counts))

    def show_names_of(self, model: str) -> None:
        """Add vLLM's metrics to the page: Baton's values under the names that vLLM uses."""
        self.of_model.register(VllmNames(self._of_other_engines, model))

    def _of_other_engines(self) -> Iterable[tuple[str, Metric]]:
        """Yield Baton's metrics under vLLM's names."""
        for name, ours in _VLLM_NAMES_OF_REQUESTS.items():
            for family in self._of_request[ours].collect():
                yield name, family
        for name, kind in (("prompt_tokens", "prompt"), ("generation_tokens", "output")):
            for family in self._tokens[kind].collect():
                yield name, family
        for family in self._requests.collect():
            yield "request_success", finished_only(family)
        if self._admission is not None:
            waiting = GaugeMetricFamily("x", "Requests that wait at the router.")
            waiting.add_metric([], self._admission.state().num_queued)
            yield "num_requests_waiting", waiting

    def show(self, collector: Collector) -> None:
        """Add the metrics of a collector to the page."""
        self.of_model.register(collector)

    def text(self) -> bytes:
        """Return the metrics page in Prometheus' text format."""
        return generate_latest(self.of_router) + generate_latest(self.of_model)

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Check a request within this context; if the check raises an error, count the request."""
        try:
            yield
        except BatonError as error:
            self._requests.labels(status_name(error).lower()).inc()
            raise

    @contextmanager
    def running(self) -> Iterator[RequestRecord]:
        """Count an accepted request as open within this context, and then by its outcome."""
        record = RequestRecord()
        self._open.inc()
        try:
            yield record
        except BatonError as error:
            record.outcome = status_name(error).lower()
            raise
        except (GeneratorExit, asyncio.CancelledError):
            raise  # `record.outcome` is right already: the request was cancelled, or has finished
        except BaseException:
            record.outcome = "internal"
            raise
        finally:
            self._open.dec()
            self._requests.labels(record.outcome).inc()
            if record.receipt is not None:
                self._observe(record.receipt)

    def _observe(self, receipt: Receipt) -> None:
        self._tokens["prompt"].inc(receipt.num_prompt_tokens)
        self._tokens["cached_prompt"].inc(receipt.num_cached_tokens)
        self._tokens["output"].inc(receipt.num_output_tokens)
        self._images["images"].inc(receipt.num_images)
        self._images["image_tokens"].inc(receipt.num_image_tokens)
        self._attempts.inc(receipt.num_attempts)
        self._adapters.note_finished(receipt)
        observe, prefill, decode = self._observe_one, receipt.prefill, receipt.decode
        observe("time_to_first_token_seconds", receipt.ttft_s)
        observe("request_seconds", receipt.total_s)
        observe("request_prompt_tokens", receipt.num_prompt_tokens)
        observe("request_output_tokens", receipt.num_output_tokens)
        observe("queue_seconds", receipt.router_queue_s + (prefill.queue_s if prefill else 0.0))
        if receipt.num_output_tokens > 1:
            observe("inter_token_latency_seconds", receipt.time_per_token_s)
            observe("decode_seconds", receipt.total_s - receipt.ttft_s)
        if prefill is not None:
            observe("prefill_seconds", prefill.prefill_s)
        if decode is not None:
            observe("first_step_seconds", decode.first_step_s)
            if decode.push.num_blocks:
                observe("exposed_transfer_seconds", decode.push.exposed_transfer_s)

    def _observe_one(self, name: str, value: float) -> None:
        self._of_request[name].observe(value)


def _collect_nodes(pool: NodePool) -> Iterable[Metric]:
    """Collect how many nodes of each role are in each state."""
    counts = {(role, state): 0 for role in NodeRole for state in _NODE_STATES}
    fleet = pool.fleet
    usable = (*fleet.prefills, *fleet.decodes, *fleet.self_prefilling)
    ready = {node.engine_id for node in usable} | pool.reachable_encode_nodes
    for node in pool.nodes:
        state = _state(node, ready) if pool.identity.admits(node) else "not_serving"
        counts[node.registration.role, state] += 1
    for registration in pool.lost:
        counts[registration.role, "lost"] += 1
    yield make_family(
        "nodes",
        "Nodes; ready: requests can go there; joined: they reach no other node yet; ejected: "
        "they failed lately, or are new and have a first request; not_serving: their model "
        "is not the one that is served.",
        ["role", "state"],
        (([role.value, state], count) for (role, state), count in counts.items()),
    )
    yield CounterMetricFamily(
        f"{PREFIX}_model_changes",
        "Times that nodes with other weights took the place of those that had served.",
        value=pool.identity.num_changes_total,
    )


def _state(node: Node, ready: Set[str]) -> str:
    if node.is_draining:
        return "draining"
    if node.engine_id in ready:
        return "ready"
    return "ejected" if node.health.is_unwanted(node.num_open) else "joined"


def _collect_pairs(pool: NodePool) -> Iterable[Metric]:
    """Collect the pairs of nodes that are connected, and how many pairs are not."""
    yield make_family(
        "pairs",
        "Pairs of nodes that fit; connected: requests can go there; down: one end does not "
        "reach the other, or is lost.",
        ["state"],
        ((["connected"], pool.num_pairs_connected), (["down"], pool.num_pairs_down)),
    )
    slowest = sorted(_label_pairs(pool, pool.list_slowest_pairs(MAX_PAIRS)), key=lambda one: one[0])
    yield make_family(
        "pair_bandwidth_bytes_per_second",
        "Of nodes that reach each other, as measured when they met; 0: unknown. Of the "
        f"{MAX_PAIRS} slowest pairs.",
        ["prefill_node", "decode_node", "transport"],
        slowest,
    )


def _label_pairs(
    pool: NodePool, pairs: Iterable[tuple[float, str, str]]
) -> Iterator[tuple[list[str], float]]:
    """Yield each pair's labels (names of both nodes, transport) and its bandwidth."""
    for rate, sender, receiver in pairs:
        prefill, decode = pool.node(sender), pool.node(receiver)
        if prefill is not None and decode is not None:
            yield [prefill.name, decode.name, prefill.reports[receiver].transport], rate


def _collect_index(pool: NodePool) -> Iterable[Metric]:
    """Collect the number of the nodes' cached blocks that the router knows of."""
    yield GaugeMetricFamily(
        f"{PREFIX}_prefix_index_blocks",
        "Cached blocks of all nodes that the router knows of.",
        value=pool.prefix_index.num_blocks,
    )


def _collect_suspects(suspects: Suspects) -> Iterable[Metric]:
    """Collect how many requests were ended or refused because they crash nodes."""
    yield GaugeMetricFamily(
        f"{PREFIX}_requests_quarantined",
        "Requests that are refused because nodes died of one like it.",
        value=len(suspects.quarantined),
    )
    for name, text, value in (
        ("poison_requests", "Requests that nodes died of.", suspects.num_ended_total),
        ("poison_requests_refused", "The like of these.", suspects.num_refused_total),
    ):
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _collect_admission(admission: Admission) -> Iterable[Metric]:
    """Collect how many requests wait at the gate, and how many it refused."""
    state = admission.state()
    for name, text, value in (
        ("requests_queued", "Requests that wait for nodes to have room.", state.num_queued),
        ("queued_prompt_tokens", "Prompt tokens of these.", state.num_queued_tokens),
        (
            "expected_wait_seconds",
            "Until those that wait have their first tokens.",
            state.expected_wait_s,
        ),
    ):
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
    text = "Requests that were refused before anything was computed for them."
    refused = (([reason], count) for reason, count in state.num_refused.items())
    yield make_family("requests_refused", text, ["reason"], refused, CounterMetricFamily)


def _collect_overload(overload: Overload) -> Iterable[Metric]:
    """Collect the overload level and its signals."""
    state = overload.state()
    yield GaugeMetricFamily(
        f"{PREFIX}_overload_level",
        "0: normal; 1: less urgent requests are refused; 2: all are.",
        value=state.level,
    )
    yield CounterMetricFamily(
        f"{PREFIX}_overload_changes", "Changes of the level.", value=state.num_changes
    )
    yield CounterMetricFamily(
        f"{PREFIX}_overload_refused",
        "Requests that were refused unread at level 2.",
        value=state.num_refused,
    )
    text = "What the level follows: seconds of the event loop's lag, else shares of a limit."
    signals = (([name], value) for name, value in state.signals.items())
    yield make_family("overload_signal", text, ["signal"], signals)


def _collect_connections(counts: ConnectionCounts) -> Iterable[Metric]:
    """Collect how many HTTP connections are open or were cut."""
    text = "Connections that are open: at work on a request, or waiting for one."
    now = ((["at_work"], counts.at_work), (["waiting"], counts.open - counts.at_work))
    yield make_family("http_connections", text, ["state"], now)
    reasons = ("refused", "displaced", "timed_out", "stalled")
    yield make_family(
        "http_connections_cut",
        "Connections that the router ended: there was no room, they made way for another one, "
        "sent no request in time, or took nothing.",
        ["reason"],
        (([reason], getattr(counts, reason)) for reason in reasons),
        CounterMetricFamily,
    )
