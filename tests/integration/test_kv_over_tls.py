"""Tests of KV over TLS between real processes: one process's tokens, even if a node dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import (
    complete_all,
    described_nodes,
    node_with,
    run_deployment,
)
from tests.fakes.time.waiting import wait_until
from tests.integration.test_recovery import (
    LONG_PROMPT,
    NODE_ARGS,
    PARAMS,
    Stream,
    all_blocks_free,
    send,
)

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]  # NIXL is not needed

OVER_TLS = [*NODE_ARGS, "--kv-connector", "tls"]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PROMPTS = [LONG_PROMPT[i * 20 : i * 20 + 1 + i * 30] for i in range(32)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32", num_threads=1)


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> Iterator[LocalDeployment]:
    with run_deployment(*OVER_TLS, *getattr(request, "param", []), num_prefill=2) as running:
        yield running


@pytest.mark.parametrize("deployment", [[], ["--kv-digests"]], indirect=True)
def test_split_over_tls_equals_one_process(deployment: LocalDeployment, llm: LLM) -> None:
    split = complete_all(deployment, PROMPTS, GREEDY)
    alone = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in split] == [c.token_ids for c in alone]
    for prompt, completion in zip(PROMPTS, split, strict=True):
        assert completion.receipt is not None
        decode = completion.receipt.decode
        if decode is not None:
            assert decode.num_prompt_tokens_computed == 0
            assert decode.push.transport == "tls/tcp"
            assert decode.num_cached_tokens + decode.push.num_blocks * 16 >= len(prompt)
    wait_until(lambda: all_blocks_free(deployment), "all blocks free")


def test_a_prefill_node_killed_in_the_middle_of_a_prompt(
    deployment: LocalDeployment, llm: LLM
) -> None:
    expected = llm.generate([LONG_PROMPT], PARAMS)[0].token_ids
    with Client(deployment.config.listen) as client:
        stream = Stream(client, LONG_PROMPT)
        name = node_with(deployment, "p", lambda n: n.beat.num_running > 0)
        send(deployment, name, signal.SIGKILL)
        assert stream.end() == expected
        receipt = stream.deltas[-1].receipt
    assert receipt is not None
    assert receipt.num_attempts == 2
    wait_until(
        lambda: described_nodes(deployment)["d0"].beat.num_free_blocks == 400, "all blocks free"
    )


def test_blocks_of_a_prefill_node_that_stands_still_are_free_at_once(
    deployment: LocalDeployment, llm: LLM
) -> None:
    """A stopped node says nothing: over NIXL its blocks would wait until the node goes on."""
    expected = llm.generate([LONG_PROMPT], PARAMS)[0].token_ids
    with Client(deployment.config.listen) as client:
        stream = Stream(client, LONG_PROMPT)
        name = node_with(deployment, "p", lambda n: n.beat.num_running > 0)
        wait_until(lambda: described_nodes(deployment)["d0"].beat.num_free_blocks < 400, "a grant")
        send(deployment, name, signal.SIGSTOP)
        try:
            assert stream.end() == expected
            wait_until(
                lambda: described_nodes(deployment)["d0"].beat.num_free_blocks == 400, "free blocks"
            )
            assert not described_nodes(deployment)["d0"].beat.num_quarantined_blocks
        finally:
            send(deployment, name, signal.SIGCONT)
        deployment.wait_ready(20)  # every pair is connected again
        for _ in range(4):  # both prefill nodes have their turn; what is late lands nowhere
            assert Stream(client, LONG_PROMPT).end() == expected
        wait_until(lambda: all_blocks_free(deployment), "all blocks free")


def test_with_certificates_of_a_ca_both_ends_verify_them(tmp_path: Path, llm: LLM) -> None:
    folder = tmp_path / "certs"
    make = [sys.executable, "-m", "baton", "certs", "dev", "--out", str(folder)]
    subprocess.run(make, check=True)
    with run_deployment(*OVER_TLS, tls_folder=folder, log_folder=tmp_path / "logs") as running:
        config = running.config
        with Client(config.listen, tls=config.tls_of("client")) as client:
            completion = client.generate(LONG_PROMPT, GREEDY)
    assert completion.token_ids == llm.generate([LONG_PROMPT], GREEDY)[0].token_ids
    assert completion.receipt is not None
    assert completion.receipt.decode is not None
    assert completion.receipt.decode.push.transport == "tls/tcp"


def test_idle_nodes_rest(deployment: LocalDeployment) -> None:
    complete_all(deployment, PROMPTS[:4], GREEDY)
    time.sleep(3.0)  # whatever was warm is cold
    used = {child.name: cpu_s(child.process.pid) for child in deployment.children}
    time.sleep(5.0)
    for child in deployment.children:
        if child.name != "router":
            assert cpu_s(child.process.pid) - used[child.name] < 0.5, child.name  # 1 % in the log


def cpu_s(pid: int) -> float:

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
