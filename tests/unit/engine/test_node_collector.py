"""Unit tests of a node's metrics page: an engine's real numbers, over HTTP, as Prometheus reads."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.access.access import Access
from baton.api.errors import ConfigError
from baton.kv.residency import RESIDENCY_S, BlockResidency, SecondsHistogram
from baton.link.words import NodeRole
from baton.serving.metrics_page import MetricsPage
from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger, balance
from engine.core.metrics import STEP_TOKENS, EngineMetrics, KVFileCounts, PinCounts
from kvconnector.base import ConnectorMetrics, HandoffMetrics, TransferOutcome
from node_runtime.reports.collector import NodeCollector

pytestmark = pytest.mark.medium

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
BY_PLACE = (700, 400)
PINS = PinCounts(*range(81_001, 81_008))
STEPS = tuple(1000 + i for i in range(len(STEP_TOKENS) + 1))
STARTED = {"negative": 801, "zero": 802, "positive": 803}
PREEMPTED = {"negative": 811, "zero": 812, "positive": 813}
RESIDENCY = BlockResidency(
    *(
        SecondsHistogram([index * 1000 + i for i in range(len(RESIDENCY_S) + 1)], 0.5 + index)
        for index in (3, 4, 5)
    )
)
AGES = SecondsHistogram([0, 3, 4, *[0] * 9], 55.5)
FILES = KVFileCounts(
    *(901, {"late": 902}, 903, 910, 904, {"written": 905}, 906, 907, 908, 909, True, AGES)
)
COMMON = {"role": "decode", "node": "d0"}


class Source:
    """Numbers of no engine; a ledger only if there is one."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.calls: list[Future[Ledger]] = []
        self._ledger = ledger

    def engine_metrics(self) -> EngineMetrics:
        names = list(EngineMetrics.__dataclass_fields__)
        values: dict[str, Any] = {name: 10 + i for i, name in enumerate(names)}
        return EngineMetrics(**values | {
            "accepted_drafts_by_place": BY_PLACE, "steps_by_tokens": STEPS,
            "requests_started_by_priority": STARTED, "preemptions_by_priority": PREEMPTED,
            "residency": RESIDENCY, "kv_files": FILES, "pins": PINS,
        })  # fmt: skip

    def handoff_metrics(self) -> HandoffMetrics:
        return HandoffMetrics(
            open={"PARKED": 2, "GRANTED": 0},
            ended=dict.fromkeys(TransferOutcome, 3),
            num_quarantined_blocks=4,
            received_bytes=5,
            fetches={"received": 1},
            fetched_ages=SecondsHistogram([7, *[0] * 11], 77.0),
        )

    def connector_metrics(self) -> ConnectorMetrics:
        return ConnectorMetrics(pairs={("CONNECTED", 'a "path"'): 1}, peer_failures=6)

    def ledger(self) -> Future[Ledger]:
        call: Future[Ledger] = Future()
        self.calls.append(call)
        if self._ledger is not None:
            call.set_result(self._ledger)
        return call


LEDGER = balance(
    [
        BlockHolding(owner=BlockOwner.REQUEST, block_ids=(0, 1, 2)),
        BlockHolding(owner=BlockOwner.REQUEST, block_ids=(1,)),
        BlockHolding(owner=BlockOwner.QUARANTINE, block_ids=(4,)),
    ],
    {0: 1, 1: 2, 2: 1, 3: 1},
    num_blocks=8,
    num_free_blocks=4,
)


def scrape(source: Source, **options: Any) -> dict[str, Metric]:
    """Return the metrics of a page, read over HTTP."""

    async def run() -> str:
        page = MetricsPage(NodeCollector(NodeRole.DECODE, "d0", source, **options))
        await page.start("127.0.0.1:0")
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{page.address}/metrics") as response,
            ):
                assert response.status == 200
                return await response.text()
        finally:
            await page.close()

    text = asyncio.run(asyncio.wait_for(run(), 30))
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: dict[str, Metric], name: str, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in families[name].samples}


def value(families: dict[str, Metric], name: str) -> float:
    (sample,) = families[name].samples
    assert sample.labels == COMMON
    return sample.value


@pytest.fixture
def source() -> Source:
    return Source(LEDGER)


def test_every_exported_name_is_documented_and_every_documented_name_exported(
    source: Source,
) -> None:
    families = scrape(source)
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families.values()
        if family.name.startswith("baton_")
    }
    documented = set(re.findall(r"^\| `(baton_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert exported == documented
    assert families["process_open_fds"].samples[0].value > 0


def test_a_leak_and_an_overdraft_are_seen(source: Source) -> None:
    families = scrape(source)
    held = values(families, "baton_blocks_held", "owner")
    assert set(held) == {owner.value for owner in BlockOwner}
    assert (held["request"], held["quarantine"], held["grant"]) == (4, 1, 0)
    assert value(families, "baton_block_references") == 5
    assert value(families, "baton_block_references_owned") == 5  # one too few, and one too many
    assert value(families, "baton_blocks_orphaned") == 1
    assert value(families, "baton_blocks_overdrawn") == 1
    assert value(families, "baton_ledger_available") == 1


def test_the_ages_of_hits_are_reported_by_source(source: Source) -> None:
    family = scrape(source)["baton_prefix_hit_age_seconds"]
    sums = {
        sample.labels["source"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_sum")
    }
    expected = {"memory": RESIDENCY.reuse_gap.sum_s, "objects": AGES.sum_s, "fetched": 77.0}
    assert sums == expected
    counts = [
        sample.value
        for sample in family.samples
        if sample.name.endswith("_count") and sample.labels["source"] == "objects"
    ]
    assert counts == [sum(AGES.counts)]


def test_every_number_of_the_engine_is_on_the_page(source: Source) -> None:
    families = scrape(source)
    ours = [family for name, family in families.items() if name.startswith("baton_")]
    samples = [sample.value for family in ours for sample in family.samples]
    engine = source.engine_metrics()
    fields = dict.fromkeys(EngineMetrics.__dataclass_fields__)
    # Of these the parts: by place, and up to each bound.
    for name in (
        "accepted_drafts_total", "accepted_drafts_by_place", "steps_by_tokens",
        "requests_started_by_priority", "preemptions_by_priority", "residency", "kv_files",
        "pins",
    ):  # fmt: skip
        del fields[name]
    parts = dataclasses.astuple(FILES)
    of_files = [n for one in parts[:-2] for n in (one.values() if isinstance(one, dict) else [one])]
    numbers = [
        *BY_PLACE,
        *of_files,
        *dataclasses.astuple(PINS),
        *(getattr(engine, name) for name in fields),
    ]
    assert values(families, "baton_requests_started", "priority") == STARTED
    assert values(families, "baton_preemptions_by_priority", "priority") == PREEMPTED
    for name, expected in (
        ("lifetime", RESIDENCY.lifetime),
        ("idle_before_evict", RESIDENCY.idle_before_eviction),
        ("reuse_gap", RESIDENCY.reuse_gap),
    ):
        found = families[f"baton_kv_block_{name}_seconds"].samples
        buckets = [sample.value for sample in found if sample.name.endswith("_bucket")]
        assert buckets == list(itertools.accumulate(expected.counts))
        assert [s.value for s in found if s.name.endswith("_sum")] == [expected.sum_s]
    steps = [s.value for s in families["baton_step_tokens"].samples if s.name.endswith("_bucket")]
    assert steps == list(itertools.accumulate(STEPS))
    assert [number for number in numbers if samples.count(number) != 1] == []
    assert values(families, "baton_transfers", "state") == {"PARKED": 2, "GRANTED": 0}
    assert values(families, "baton_pairs", "transport") == {'a "path"': 1}


def test_of_a_node_that_is_stuck_in_a_step_the_page_says_all_but_the_ledger() -> None:
    source = Source(None)
    families = scrape(source, ledger_timeout_s=0.01)
    assert value(families, "baton_ledger_available") == 0
    assert value(families, "baton_blocks_quarantined") == 4
    assert "baton_blocks_held" not in families
    (call,) = source.calls
    assert call.cancelled()


def test_an_address_that_is_taken_is_one_line(source: Source) -> None:
    collector = NodeCollector(NodeRole.DECODE, "d0", source)

    async def start(listen: str) -> None:
        await MetricsPage(collector).start(listen)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"metrics_listen: cannot listen on {listen} \(addr"):
            asyncio.run(start(listen))
    with pytest.raises(ConfigError, match="metrics_listen: must be host:port, got 'here'"):
        asyncio.run(start("here"))


def test_probes_are_answered_though_nobody_may_look(source: Source) -> None:
    is_ready = False

    async def run() -> list[int]:
        nonlocal is_ready
        page = MetricsPage(
            NodeCollector(NodeRole.DECODE, "d0", source),
            access=Access(admin_token="an operator's, 32 characters long"),
            is_ready=lambda: is_ready,
        )
        await page.start("127.0.0.1:0")
        statuses = []

        async def get(path: str) -> None:
            url = f"http://{page.address}{path}"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                statuses.append(response.status)

        try:
            await get("/health")
            await get("/ready")
            is_ready = True
            await get("/ready")
            for path in ("/metrics", "/ready/", "/Ready", "/health?x=/../metrics"):
                await get(path)
        finally:
            await page.close()
        return statuses

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [200, 503, 200, 401, 401, 401, 200]
