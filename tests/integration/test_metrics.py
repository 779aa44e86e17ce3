"""The Prometheus pages of real nodes, after requests and while one runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton import AsyncClient, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.processes.deployments import run_deployment

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]
PROMPT, NUM_OUTPUTS, MIN_REQUESTS = [5, 6, 7] * 50, 100, 3


@pytest.fixture(scope="module")
def deployment() -> Iterator[LocalDeployment]:
    with run_deployment("--metrics-listen", "127.0.0.1:0", "--no-prefix-cache") as running:
        yield running


def scrape(deployment: LocalDeployment, name: str) -> list[Sample]:
    log = deployment.child(name).log.read_text(encoding="utf-8")
    url = re.findall(r"metrics at (http://\S+)", log)[-1]
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    # Figures of the whole process have the names and labels of Prometheus' own clients.
    ours = [family for family in families if not family.name.startswith("process_")]
    samples = [sample for family in ours for sample in family.samples]
    assert {sample.labels["node"] for sample in samples} == {name}
    return samples


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels."""
    found = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
    assert found, f"no {name} {labels}"
    return sum(sample.value for sample in found)


def assert_balanced(samples: list[Sample]) -> None:
    assert total(samples, "baton_ledger_available") == 1
    references = total(samples, "baton_block_references")
    assert total(samples, "baton_blocks_held") == references
    assert total(samples, "baton_block_references_owned") == references
    assert total(samples, "baton_blocks_orphaned") == 0
    assert total(samples, "baton_blocks_overdrawn") == 0


def test_the_pages_of_both_nodes_add_up(deployment: LocalDeployment) -> None:
    params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    amid: list[list[Sample]] = []

    def are_held() -> bool:
        return any(total(samples, "baton_blocks_held", owner="request") for samples in amid)

    async def run() -> int:
        num_requests = 0
        async with AsyncClient(deployment.config.listen) as client:
            # A page may take longer than a request, and so show none.
            while num_requests < MIN_REQUESTS or not are_held():
                num_requests += 1
                async with contextlib.aclosing(client.stream(PROMPT, params)) as deltas:
                    async for delta in deltas:
                        if delta.token_ids and len(amid) < 2 * num_requests:
                            amid.append(await asyncio.to_thread(scrape, deployment, "d0"))
                            amid.append(await asyncio.to_thread(scrape, deployment, "p0"))
        return num_requests

    num_requests = asyncio.run(run())
    for samples in amid:
        assert_balanced(samples)

    prefill, decode = scrape(deployment, "p0"), scrape(deployment, "d0")
    for samples in (prefill, decode):
        assert_balanced(samples)
        assert total(samples, "baton_blocks_held") == 0
        assert total(samples, "baton_blocks") == total(samples, "baton_blocks_free")
        assert total(samples, "baton_transfers") == 0
        assert total(samples, "baton_transfers_ended_total", outcome="committed") == num_requests
        assert total(samples, "baton_transfers_ended_total") == num_requests
        assert total(samples, "baton_pairs", state="CONNECTED") == 1
        assert total(samples, "baton_peer_failures_total") == 0
    num_prompt_tokens = num_requests * len(PROMPT)
    assert total(prefill, "baton_prompt_tokens_computed_total") == num_prompt_tokens
    assert total(decode, "baton_prompt_tokens_computed_total") == 0
    assert total(prefill, "baton_output_tokens_total") == num_requests
    assert total(decode, "baton_output_tokens_total") == num_requests * (NUM_OUTPUTS - 1)
    sent = total(prefill, "baton_kv_sent_bytes_total")
    assert sent == total(decode, "baton_kv_received_bytes_total") > 0
    num_blocks = num_requests * -(-len(PROMPT) // 16)
    assert total(prefill, "baton_kv_sent_blocks_total") == num_blocks
    assert total(prefill, "baton_kv_descriptors_total") > 0
