"""NodeCollector: a node's metrics for Prometheus, which are read at each scrape.

Reading metrics does not delay steps. Only the ledger is read on the engine's thread, between two
steps; a node that is stuck in a step answers without the ledger. Refuses to know: peers, HTTP.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.kv.residency import RESIDENCY_S
from baton.link.words import NodeRole
from baton.serving.compat_names import VllmNames
from baton.telemetry.ledger import BlockOwner, Ledger
from engine.core.metrics import STEP_TOKENS, EngineMetrics, KVFileCounts
from kvconnector.base import ConnectorMetrics, HandoffMetrics, TransferOutcome

# Seconds that a scrape waits for the ledger: less than Prometheus's default of 10 s, and more than
# a step of a healthy node takes.
LEDGER_TIMEOUT_S = 2.0
_Labels = Mapping[str, str]
_NONE: _Labels = {}


class TransferSource(Protocol):
    """Interface that a scrape reads on any kind of node; all methods are safe from any thread."""

    def handoff_metrics(self) -> HandoffMetrics: ...

    def connector_metrics(self) -> ConnectorMetrics: ...

    def ledger(self) -> Future[Ledger]: ...


class MetricsSource(TransferSource, Protocol):
    """Interface that a scrape reads on a node with an engine; safe from any thread."""

    def engine_metrics(self) -> EngineMetrics: ...


class TransferCollector(Collector):
    """The metric families of transfers, peers and blocks, which all nodes have.

    Args:
        role: the node's role, a label of each sample.
        node: the node's name, a label of each sample.
        source: what a scrape reads.
        ledger_timeout_s: maximum number of seconds that a scrape waits for the ledger.
    """

    def __init__(
        self,
        role: NodeRole,
        node: str,
        source: TransferSource,
        ledger_timeout_s: float = LEDGER_TIMEOUT_S,
    ) -> None:
        self._common = {"role": role.name.lower(), "node": node}
        self._transfers = source
        self._ledger_timeout_s = ledger_timeout_s

    def describe(self) -> list[Metric]:
        return []  # so that registering the collector reads nothing

    def _take_ledger(self) -> Ledger | None:
        call = self._transfers.ledger()
        try:
            return call.result(self._ledger_timeout_s)
        except TimeoutError:
            call.cancel()
            return None

    def _of_handoffs(self, handoffs: HandoffMetrics) -> Iterator[Metric]:
        yield self._family(
            GaugeMetricFamily, "transfers", "Open transfers.", _by("state", handoffs.open)
        )
        ended = {outcome.value: handoffs.ended[outcome] for outcome in TransferOutcome}
        yield self._family(
            CounterMetricFamily, "transfers_ended", "Ended transfers.", _by("outcome", ended)
        )
        yield self._gauge(
            "blocks_quarantined",
            "Blocks of ended requests that are still on the wire.",
            handoffs.num_quarantined_blocks,
        )
        yield self._counter(
            "kv_received_bytes", "KV of committed transfers.", handoffs.received_bytes
        )
        yield self._gauge(
            "encodings_open", "Encodings on their way from encode nodes.", handoffs.encodings_open
        )
        yield self._counter(
            "encodings_lost",
            "Images encoded here because no encode node's encoding came.",
            handoffs.encodings_lost,
        )
        yield self._gauge(
            "fetches_open",
            "Cached prefixes that are sent, expected or in quarantine.",
            handoffs.fetches_open,
        )
        ends = dict.fromkeys(("expected", "received", "lost"), 0) | dict(handoffs.fetches)
        yield self._family(
            CounterMetricFamily,
            "fetches",
            "Cached prefixes, by what became of them.",
            _by("state", ends),
        )
        yield self._counter(
            "fetched_tokens", "Tokens of the received prefixes.", handoffs.fetched_tokens
        )
        yield self._counter(
            "fetched_bytes", "Bytes of the received prefixes.", handoffs.fetched_bytes
        )
        yield self._counter(
            "shared_tokens", "Tokens of prefixes sent to other nodes.", handoffs.shared_tokens
        )

    def _of_connector(self, connector: ConnectorMetrics) -> Iterator[Metric]:
        pairs = [
            ({"state": state, "transport": path}, number)
            for (state, path), number in sorted(connector.pairs.items())
        ]
        yield self._family(GaugeMetricFamily, "pairs", "Peers of this node.", pairs)
        yield self._gauge(
            "kv_connections",
            "Peers with an open connection, kept peers included.",
            connector.connections,
        )
        counter = self._counter
        yield counter("peer_failures", "Peers found silent.", connector.peer_failures)
        yield counter("kv_sent_bytes", "KV posted to peers.", connector.sent_bytes)
        yield counter("kv_sent_blocks", "Blocks posted to peers.", connector.sent_blocks)
        yield counter("kv_descriptors", "Ranges these were posted as.", connector.descriptors)
        yield counter("kv_posting_seconds", "Time in posting.", connector.posting_s)
        yield counter("kv_wrong_blocks", "Blocks that arrived wrong.", connector.wrong_blocks)
        refused = _by("reason", connector.refused_messages)
        yield self._family(
            CounterMetricFamily, "kv_refused_messages", "Messages that were refused.", refused
        )

    def _of_ledger(self, ledger: Ledger | None) -> Iterator[Metric]:
        yield self._gauge(
            "ledger_available",
            "Whether the node took its ledger in time; if not, it is stuck in a step.",
            ledger is not None,
        )
        if ledger is None:
            return
        held: Counter[BlockOwner] = Counter()
        for holding in ledger.holdings:
            held[holding.owner] += len(holding.block_ids)
        samples = _by("owner", {owner.value: held[owner] for owner in BlockOwner})
        gauge = self._gauge
        yield self._family(
            GaugeMetricFamily, "blocks_held", "References by kind of owner.", samples
        )
        yield gauge("block_references", "References that the pool counts.", ledger.num_references)
        yield gauge("block_references_owned", "References that have an owner.", held.total())
        yield gauge("blocks_orphaned", "More references than owners: leaked.", ledger.num_orphans)
        yield gauge("blocks_overdrawn", "More owners than references.", ledger.num_overdrawn)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        """Make a histogram of counted values.

        Args:
            bounds: upper limits of all buckets except the last.
            counts: number of values in each bucket, of which there is one more than ``bounds``.
            total: sum of all values.
        """
        family = HistogramMetricFamily(f"baton_{name}", text, labels=[*self._common])
        so_far = itertools.accumulate(counts)
        buckets = list(zip([*map(str, bounds), "+Inf"], so_far, strict=True))
        family.add_metric([*self._common.values()], buckets, total)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, [(_NONE, value)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, [(_NONE, value)])

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        samples: Sequence[tuple[_Labels, float]],
    ) -> Metric:
        own = list(samples[0][0]) if samples else []
        family = kind(f"baton_{name}", text, labels=[*self._common, *own])
        for labels, value in samples:
            family.add_metric([*self._common.values(), *labels.values()], value)
        return family

    def _of_transfers(self) -> Iterator[Metric]:
        yield from self._of_handoffs(self._transfers.handoff_metrics())
        yield from self._of_connector(self._transfers.connector_metrics())
        yield from self._of_ledger(self._take_ledger())


class NodeCollector(TransferCollector):
    """The metric families of a node with an engine; docs/metrics.md lists them.

    Args:
        role: the node's role, a label of each sample.
        node: the node's name, a label of each sample.
        source: what a scrape reads.
        ledger_timeout_s: maximum number of seconds that a scrape waits for the ledger.
        vllm_model: model name in metrics with vLLM's names; empty: no such metrics.
    """

    def __init__(
        self,
        role: NodeRole,
        node: str,
        source: MetricsSource,
        ledger_timeout_s: float = LEDGER_TIMEOUT_S,
        *,
        vllm_model: str = "",
    ) -> None:
        super().__init__(role, node, source, ledger_timeout_s)
        self._source = source
        self._vllm_names: VllmNames | None = None
        if vllm_model:
            self._vllm_names = VllmNames(self._of_other_engines, vllm_model)

    def collect(self) -> Iterator[Metric]:
        if self._vllm_names is not None:
            yield from self._vllm_names.collect()
        engine = self._source.engine_metrics()
        yield from self._of_engine(engine)
        yield self._hit_ages(engine, self._source.handoff_metrics())
        yield from self._of_transfers()

    # ------------------------------------------------------------------ families

    def _of_engine(self, engine: EngineMetrics) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        yield from self._of_blocks(engine)
        states = {
            "running": engine.requests_running,
            "waiting": engine.requests_waiting,
            "parked": engine.requests_parked,
        }
        yield self._family(GaugeMetricFamily, "requests", "Open requests.", _by("state", states))
        reasons = {
            "stop": engine.requests_finished_stop_total,
            "length": engine.requests_finished_length_total,
            "abort": engine.requests_finished_abort_total,
        }
        samples = _by("reason", reasons)
        yield self._family(CounterMetricFamily, "requests_finished", "Finished requests.", samples)
        yield counter("steps", "Steps that computed something.", engine.steps_total)
        yield self._step_tokens(engine)
        yield counter(
            "received_prompt_tokens",
            "Prompt tokens whose KV a prefill node wrote.",
            engine.received_prompt_tokens_total,
        )
        yield counter(
            "prompt_tokens_computed",
            "Prompt tokens, again and again if preempted.",
            engine.prompt_tokens_computed_total,
        )
        yield counter("output_tokens", "Tokens sampled here.", engine.output_tokens_total)
        yield counter(
            "cached_prompt_tokens",
            "Prompt tokens found in the prefix cache.",
            engine.cached_prompt_tokens_total,
        )
        yield counter(
            "prefix_lookups", "Requests looked up in the prefix cache.", engine.prefix_lookups_total
        )
        yield counter(
            "prefix_lookup_tokens", "Prompt tokens looked up.", engine.prefix_lookup_tokens_total
        )
        yield counter("preemptions", "Requests that lost their blocks.", engine.preemptions_total)
        yield from self._by_priority(engine)
        yield counter("draft_steps", "Steps with drafts, by request.", engine.draft_steps_total)
        yield counter("drafts", "Computed drafts.", engine.drafts_total)
        places = {str(i): n for i, n in enumerate(engine.accepted_drafts_by_place, 1)}
        yield self._family(
            CounterMetricFamily, "accepted_drafts", "Accepted drafts.", _by("place", places)
        )
        yield counter(
            "forward_seconds", "Time in the model and the sampler.", engine.forward_seconds_total
        )
        yield counter("step_seconds", "Time in whole steps.", engine.step_seconds_total)
        yield from self._of_work(engine)
        yield from self._of_experts(engine)
        yield from self._of_images(engine)
        if engine.kv_files is not None:
            yield from self._of_files(engine.kv_files)
        yield gauge("uptime_seconds", "Since the engine was made.", engine.uptime_seconds)

    def _by_priority(self, engine: EngineMetrics) -> Iterator[Metric]:
        for name, text, numbers in (
            (
                "requests_started",
                "Requests that began to run.",
                engine.requests_started_by_priority,
            ),
            (
                "preemptions_by_priority",
                "Preemptions by the sign of the request's priority.",
                engine.preemptions_by_priority,
            ),
        ):
            yield self._family(CounterMetricFamily, name, text, _by("priority", numbers))

    def _of_blocks(self, engine: EngineMetrics) -> Iterator[Metric]:
        gauge = self._gauge
        yield gauge("blocks", "KV blocks.", engine.blocks)
        yield gauge("blocks_free", "KV blocks that nobody holds.", engine.blocks_free)
        yield gauge("blocks_cached", "Blocks in the prefix cache.", engine.blocks_cached)
        yield self._counter(
            "blocks_evicted",
            "Blocks that were allocated while they cached something.",
            engine.blocks_evicted_total,
        )
        pins = engine.pins
        yield gauge("blocks_pinned", "Cached blocks that pins keep.", pins.blocks)
        yield gauge("pins", "Pinned prefixes.", pins.open)
        yield self._counter("pins_made", "Prefixes that were pinned.", pins.made)
        ends = {
            "expired": pins.expired,
            "displaced": pins.displaced,
            "dropped": pins.dropped,
            "refused": pins.refused,
        }
        yield self._family(
            CounterMetricFamily, "pins_ended", "Ended and refused pins.", _by("reason", ends)
        )
        yield gauge("blocks_used_peak", "Most blocks in use at a time.", engine.blocks_used_peak)
        yield gauge("kv_slots_held", "Tokens that requests' blocks hold.", engine.kv_slots_held)
        yield gauge("kv_slots_unfilled", "Slots without a token.", engine.kv_slots_unfilled)
        residency = engine.residency
        for name, text, seconds in (
            ("lifetime", "From caching to eviction.", residency.lifetime),
            ("idle_before_evict", "From release to eviction.", residency.idle_before_eviction),
            ("reuse_gap", "From release until taken back.", residency.reuse_gap),
        ):
            yield self._histogram(
                f"kv_block_{name}_seconds", text, RESIDENCY_S, seconds.counts, seconds.sum_s
            )

    def _hit_ages(self, engine: EngineMetrics, handoffs: HandoffMetrics) -> Metric:
        """Return histograms of the ages of cached blocks when requests used them, by source."""
        family = HistogramMetricFamily(
            "baton_prefix_hit_age_seconds",
            "From a cached block's last use until the next one.",
            labels=[*self._common, "source"],
        )
        ages = {"memory": engine.residency.reuse_gap}
        if engine.kv_files is not None:
            ages["objects" if engine.kv_files.are_objects else "files"] = engine.kv_files.ages
        if handoffs.fetches:
            ages["fetched"] = handoffs.fetched_ages
        for source, seconds in ages.items():
            so_far = itertools.accumulate(seconds.counts)
            buckets = list(zip([*map(str, RESIDENCY_S), "+Inf"], so_far, strict=True))
            family.add_metric([*self._common.values(), source], buckets, seconds.sum_s)
        return family

    def _of_work(self, engine: EngineMetrics) -> Iterator[Metric]:
        counter = self._counter
        yield counter("model_flops", "Estimated by configuration.", engine.model_flops_total)
        yield counter(
            "weight_read_bytes", "Weights that steps read.", engine.weight_read_bytes_total
        )
        yield counter("kv_read_bytes", "KV that steps read.", engine.kv_read_bytes_total)
        for name, text, peak in (
            ("device_peak_flops", "FLOPs per second, by option.", engine.device_peak_flops),
            ("device_peak_bandwidth", "Bytes per second, by option.", engine.device_peak_bandwidth),
        ):
            if peak:
                yield self._gauge(name, text, peak)

    def _of_experts(self, engine: EngineMetrics) -> Iterator[Metric]:
        for name, text, rows in (
            ("busiest", "Rows of the busiest rank.", engine.expert_rows_busiest_rank_total),
            ("mean", "Rows of a mean rank.", engine.expert_rows_mean_rank_total),
        ):
            yield self._counter(f"expert_rows_{name}_rank", text, rows)

    def _of_images(self, engine: EngineMetrics) -> Iterator[Metric]:
        counter = self._counter
        yield counter("images_encoded", "Images that steps encoded.", engine.images_encoded_total)
        yield counter(
            "encodings_received",
            "Images that encode nodes encoded.",
            engine.encodings_received_total,
        )
        yield counter(
            "encoder_cache_hits",
            "Images of prompts whose encoding was found.",
            engine.encoder_cache_hits_total,
        )
        yield counter("encoder_seconds", "Time in the encoder.", engine.encoder_seconds_total)

    def _of_files(self, files: KVFileCounts) -> Iterator[Metric]:
        gauge, counter, family = self._gauge, self._counter, self._family
        yield gauge("kv_files_bytes", "Bytes of the folder's files.", files.bytes_stored)
        yield gauge("kv_files", "Files in the folder.", files.files_stored)
        yield counter("kv_file_hits", "Requests that got blocks from files.", files.hits)
        misses = _by("cause", files.misses)
        yield family(CounterMetricFamily, "kv_file_misses", "Misses in files, by cause.", misses)
        yield counter("kv_file_read_tokens", "Tokens read from files.", files.tokens_read)
        yield counter(
            "kv_file_unawaited_tokens",
            "Tokens read from files for which no request waited.",
            files.tokens_unawaited,
        )
        yield counter("kv_file_read_bytes", "Bytes read from files.", files.bytes_read)
        yield counter("kv_file_written_bytes", "Bytes written to files.", files.bytes_written)
        runs = _by("state", files.runs)
        yield family(CounterMetricFamily, "kv_file_runs", "Runs of blocks to write.", runs)
        yield counter("kv_files_evicted", "Files removed from a full folder.", files.files_evicted)

    # ------------------------------------------------------------------ inside

    def _step_tokens(self, engine: EngineMetrics) -> Metric:
        return self._histogram(
            "step_tokens",
            "Tokens that a step computes.",
            STEP_TOKENS,
            engine.steps_by_tokens,
            engine.step_tokens_total,
        )

    def _of_other_engines(self) -> Iterator[tuple[str, Metric]]:
        """Return those of Baton's metrics that vLLM has, too, under vLLM's names."""
        engine = self._source.engine_metrics()
        used = 1 - engine.blocks_free / max(engine.blocks, 1)
        gauge, counter = self._gauge, self._counter
        for name, value in (
            ("num_requests_running", engine.requests_running),
            ("num_requests_waiting", engine.requests_waiting + engine.requests_parked),
            ("kv_cache_usage_perc", used),
            ("gpu_cache_usage_perc", used),  # name in older versions of vLLM
        ):
            yield name, gauge("x", "As vLLM's.", value)
        for name, value in (
            ("num_preemptions", engine.preemptions_total),
            ("prefix_cache_queries", engine.prefix_lookup_tokens_total),
            ("prefix_cache_hits", engine.cached_prompt_tokens_total),
        ):
            yield name, counter("x", "As vLLM's.", value)
        yield "iteration_tokens_total", self._step_tokens(engine)


def _by(label: str, numbers: Mapping[str, float]) -> list[tuple[_Labels, float]]:
    return [({label: key}, number) for key, number in numbers.items()]
