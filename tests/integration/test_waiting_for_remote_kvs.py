"""A request really waits: it is parked while its prefill is held back, and then runs at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from baton import Client, Completion, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from baton.v1 import admin_pb2, admin_pb2_grpc
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPT_A = "import os\n\n\ndef list_files(folder):\n"
PROMPT_B = "class Stack:\n    def push(self, item):\n"


@pytest.fixture(scope="module")
def two_prefill_nodes() -> Iterator[LocalDeployment]:
    """Requests go to the prefill nodes in turn."""
    with run_deployment(
        "--kv-cache-memory",
        "128M",
        local_prefill=True,
        num_prefill=2,
        # The router must wait for a stopped node.
        router_args=["--policy", "round_robin", "--node-timeout-s", "120"],
    ) as running:
        yield running


class DecodeNodeView:
    """View of the decode node's requests, asked for through the router."""

    def __init__(self, router: str) -> None:
        self._channel = grpc.insecure_channel(router)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def close(self) -> None:
        self._channel.close()

    def list(self) -> admin_pb2.ListRequestsResponse:
        response = self._stub.ListNodeRequests(admin_pb2.NodeRequest(node="d0"), timeout=20)
        assert isinstance(response, admin_pb2.ListRequestsResponse)
        return response

    def wait_for(self, status: str, timeout_s: float = 20.0) -> admin_pb2.RequestDescription:
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            for request in self.list().requests:
                if request.status == status:
                    return request
            time.sleep(0.01)
        raise AssertionError(f"no request became {status}: {self.list()}")

    def wait_until_empty(self) -> None:
        def is_empty() -> bool:
            held = self.list()
            return not held.requests and held.num_free_blocks == held.num_blocks

        wait_until(is_empty, "no request and all blocks free")


def test_a_held_back_request_waits_while_others_decode(
    two_prefill_nodes: LocalDeployment,
) -> None:
    router = two_prefill_nodes.config.listen
    held_back = next(c for c in two_prefill_nodes.children if c.name == "p0").process
    view = DecodeNodeView(router)
    results: dict[str, Completion] = {}
    held_back.send_signal(signal.SIGSTOP)
    try:
        with Client(router) as client:
            parked_call = threading.Thread(
                target=lambda: results.update(a=client.generate(PROMPT_A, GREEDY))
            )
            parked_call.start()  # its turn: p0
            parked = view.wait_for("WAITING_FOR_REMOTE_KVS")
            assert parked.num_computed_tokens == 0
            assert parked.num_blocks == 0  # granted just in time, not on arrival
            other = client.generate(PROMPT_B, GREEDY)  # p1's turn
            assert other.receipt is not None
            assert other.receipt.prefill_node == "p1"
            still = view.wait_for("WAITING_FOR_REMOTE_KVS", timeout_s=1.0)
            assert still.request_id == parked.request_id
            assert "a" not in results
            held_back.send_signal(signal.SIGCONT)
            parked_call.join(timeout=60)
    finally:
        held_back.send_signal(signal.SIGCONT)
    receipt = results["a"].receipt
    assert receipt is not None
    assert receipt.decode is not None
    assert receipt.prefill_node == "p0"
    assert receipt.decode.steps_until_first == 1  # in the step after the commit
    assert receipt.decode.num_prompt_tokens_computed == 0
    alone = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1).generate(
        [PROMPT_A, PROMPT_B], GREEDY
    )
    assert [results["a"].token_ids, other.token_ids] == [c.token_ids for c in alone]
    view.wait_until_empty()
    view.close()


def test_a_cancelled_parked_request_leaves_nothing(two_prefill_nodes: LocalDeployment) -> None:
    router = two_prefill_nodes.config.listen
    view = DecodeNodeView(router)
    stopped = [c.process for c in two_prefill_nodes.children if c.name.startswith("p")]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        with Client(router) as client, pytest.raises(Exception, match=r"(?i)deadline"):
            client.generate(PROMPT_A, GREEDY, timeout_s=1.0)
        give_up_at = time.monotonic() + 10
        while view.list().requests and time.monotonic() < give_up_at:
            time.sleep(0.05)
        assert not view.list().requests
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)
    with Client(router) as client:  # and everything still works
        assert client.generate(PROMPT_B, GREEDY).token_ids
    view.wait_until_empty()
    view.close()
