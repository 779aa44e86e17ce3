"""Nodes of several ranks, of unlike shapes: tokens of one process, and what a dead rank does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2, admin_pb2_grpc
from engine import LLM
from tests.fakes.processes.deployments import complete_all
from tests.fakes.processes.rank_processes import ranks_of
from tests.fakes.time.waiting import wait_until
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + (i * 31 + j * 7) % 4000 for j in range(30 * (i + 1))] for i in range(4)]
Shape = tuple[int, int]  # tensor-parallel size, stages


def options(shape: Shape) -> list[str]:
    return ["--tensor-parallel-size", str(shape[0]), "--pipeline-parallel-size", str(shape[1])]


def config_of(prefill: Shape, decode: Shape, *, num_nodes: int = 1) -> LocalDeploymentConfig:
    return LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        num_prefill=num_nodes,
        num_decode=num_nodes,
        router_args=["--no-local-prefill"],  # what is tested is the split
        node_args=["--dtype", "float32", "--kv-cache-memory", "32M",
                   "--long-prefill-token-threshold", "64"],
        prefill_args=options(prefill),
        decode_args=options(decode),
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Tokens that one process generates."""
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1, kv_cache_bytes=2**25)
    return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("prefill", "decode", "more"),
    [
        ((2, 1), (1, 1), ["--kv-digests"]),
        ((1, 1), (2, 1), []),
        ((1, 2), (2, 1), ["--kv-digests"]),
        ((2, 1), (1, 1), ["--kv-layout", "heads", "--kv-digests"]),
        pytest.param((1, 1), (2, 1), ["--kv-layout", "heads"], marks=pytest.mark.lengthy),
        pytest.param((1, 1), (1, 1), ["--kv-layout", "heads"], marks=pytest.mark.lengthy),
        pytest.param((4, 1), (2, 1), [], marks=pytest.mark.lengthy),
        pytest.param((2, 1), (1, 2), [], marks=pytest.mark.lengthy),
        pytest.param((2, 2), (1, 1), [], marks=pytest.mark.lengthy),
    ],
    ids=str,
)
def test_unlike_shapes_give_the_tokens_of_one_process(
    expected: list[tuple[int, ...]], prefill: Shape, decode: Shape, more: list[str]
) -> None:
    config = config_of(prefill, decode)
    config = LocalDeploymentConfig(
        **{
            **{name: getattr(config, name) for name in config.__dataclass_fields__},
            "node_args": [*config.node_args, *more],
        }
    )
    before = set(Path("/dev/shm").iterdir())
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        completions = complete_all(running, PROMPTS, PARAMS)
        processes = [pid for name in ("p0", "d0") for pid in ranks_of(running, name)]
    assert [tuple(completion.token_ids) for completion in completions] == expected
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.receipt is not None
        assert completion.receipt.decode is not None
        push = completion.receipt.decode.push
        assert push.num_blocks == -(-len(prompt) // 16)
        assert push.num_bytes == push.num_blocks * block_bytes()
        if "heads" in more:
            num_pairs = max(prefill[0], decode[0])
            assert push.num_descriptors <= push.num_blocks * num_pairs
    wait_until(lambda: not any(map(is_running, processes)), "all ranks have ended")
    assert set(Path("/dev/shm").iterdir()) <= before


def block_bytes() -> int:
    """Return the bytes of a demo-model block in float32: 6 layers, K and V, 2 heads of 64."""
    return 6 * 2 * 2 * 16 * 64 * 4


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def pairs() -> Iterator[LocalDeployment]:
    """Two prefill and two decode nodes of two ranks each."""
    config = config_of((2, 1), (2, 1), num_nodes=2)
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        yield running


@pytest.mark.lengthy
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("which", [0, 1], ids=["leader", "other"])
@pytest.mark.parametrize("role", ["p", "d"])
def test_a_node_ends_as_one_with_any_of_its_ranks_and_its_requests_go_on_elsewhere(
    pairs: LocalDeployment, role: str, which: int, number: signal.Signals
) -> None:
    prompt = [5 + j * (which + 3) % 4000 for j in range(1200)]
    with Client(pairs.config.listen) as client, ThreadPoolExecutor(1) as pool:
        request = pool.submit(client.generate, prompt, LONG)
        name = node_with_a_request(pairs, role)
        processes = ranks_of(pairs, name)
        os.kill(processes[which], number)
        wait_until(lambda: not any(map(is_running, processes)), f"{name} has ended")
        token_ids = request.result().token_ids
        assert len(token_ids) == LONG.max_tokens
        assert client.generate(prompt, LONG).token_ids == token_ids
    pairs.restart(name)
    pairs.wait_ready(READY_TIMEOUT_S)


def node_with_a_request(deployment: LocalDeployment, role: str) -> str:
    """The first node of a role that has something to do."""
    found: list[str] = []

    def look() -> bool:
        with grpc.insecure_channel(deployment.config.listen) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            for node in stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=5).nodes:
                if node.node_name[0] == role and not node.lost:
                    answer = stub.ListNodeRequests(
                        admin_pb2.NodeRequest(node=node.node_name), timeout=5
                    )
                    if answer.requests:
                        found.append(node.node_name)
        return bool(found)

    wait_until(look, f"a node {role} with a request")
    return found[0]
