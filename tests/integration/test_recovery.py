"""Nodes are killed and stopped under requests: the clients get the tokens of one process."""

from __future__ import annotations

import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from baton import Client, SamplingParams, TextDelta
from baton.api.errors import NodeUnavailableError
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import described_nodes, node_with, run_deployment
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_tokens=150, temperature=0.8, seed=3, ignore_eos=True)
LONG_PROMPT = [7 + (i * 31) % 4000 for i in range(1800)]
SHORT_PROMPT = LONG_PROMPT[:40]
# Small chunks, so that there is a middle of a prompt.
NODE_ARGS = [
    "--num-blocks", "400", "--long-prefill-token-threshold", "64",
    "--metrics-listen", "127.0.0.1:0",
]  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> dict[int, tuple[int, ...]]:
    """By the prompt's length, what one process says."""
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_threads=1)
    completions = llm.generate([LONG_PROMPT, SHORT_PROMPT], PARAMS)
    return {len(LONG_PROMPT): completions[0].token_ids, len(SHORT_PROMPT): completions[1].token_ids}


def start(num_prefill: int, num_decode: int, *router_args: str) -> Iterator[LocalDeployment]:
    with run_deployment(
        *NODE_ARGS,
        local_prefill=True,
        num_prefill=num_prefill,
        num_decode=num_decode,
        router_args=router_args,
    ) as running:
        yield running


@pytest.fixture
def two_prefill_nodes() -> Iterator[LocalDeployment]:
    yield from start(2, 1)


@pytest.fixture
def two_decode_nodes() -> Iterator[LocalDeployment]:
    yield from start(1, 2, "--return-timeout-s", "5")


@dataclass
class Stream:
    """A request on a thread of its own, and when each piece came."""

    client: Client
    prompt: list[int]
    deltas: list[TextDelta] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for delta in self.client.stream(self.prompt, PARAMS, timeout_s=60):
                self.deltas.append(delta)
                self.times.append(time.monotonic())
        except Exception as error:
            self.errors.append(error)

    def end(self) -> tuple[int, ...]:
        self._thread.join()
        if self.errors:
            raise self.errors[0]
        token_ids: list[int] = []
        for delta in self.deltas:  # (one delta may have several tokens)
            assert delta.output_index == len(token_ids)
            token_ids += delta.token_ids
        return tuple(token_ids)


def send(deployment: LocalDeployment, name: str, number: signal.Signals) -> None:
    (child,) = [c for c in deployment.children if c.name == name]
    child.process.send_signal(number)


def test_a_prefill_node_killed_in_the_middle_of_a_prompt(
    two_prefill_nodes: LocalDeployment, expected: dict[int, tuple[int, ...]]
) -> None:
    with Client(two_prefill_nodes.config.listen) as client:
        stream = Stream(client, LONG_PROMPT)
        name = node_with(two_prefill_nodes, "p", lambda n: n.beat.num_running > 0)
        send(two_prefill_nodes, name, signal.SIGKILL)
        assert stream.end() == expected[len(LONG_PROMPT)]
        receipt = stream.deltas[-1].receipt
    assert receipt is not None
    assert receipt.num_attempts == 2
    # On the other one, or, where most of the prompt had been pushed, on the decode node itself.
    assert receipt.prefill_node in ({"p0": "p1", "p1": "p0"}[name], "")


def test_a_decode_node_killed_in_the_middle_of_its_tokens(
    two_decode_nodes: LocalDeployment, expected: dict[int, tuple[int, ...]]
) -> None:
    with Client(two_decode_nodes.config.listen) as client:
        stream = Stream(client, SHORT_PROMPT)
        wait_until(lambda: len(stream.deltas) > 5, "token 6")
        name = node_with(two_decode_nodes, "d", lambda n: n.num_requests > 0)
        send(two_decode_nodes, name, signal.SIGKILL)
        assert stream.end() == expected[len(SHORT_PROMPT)]
        receipt = stream.deltas[-1].receipt
        assert receipt is not None
        assert receipt.num_attempts == 2
        assert receipt.decode_node == {"d0": "d1", "d1": "d0"}[name]
        # With the other gone as well there is nobody left, and the client is told who failed.
        stream = Stream(client, SHORT_PROMPT)
        wait_until(lambda: len(stream.deltas) > 5, "token 6")
        send(two_decode_nodes, receipt.decode_node, signal.SIGKILL)
        with pytest.raises(NodeUnavailableError, match=r"d\d went away; no decode node has joined"):
            stream.end()


def test_a_stopped_decode_node_is_noticed_and_comes_back_by_itself(
    two_decode_nodes: LocalDeployment, expected: dict[int, tuple[int, ...]]
) -> None:
    with Client(two_decode_nodes.config.listen) as client:
        stream = Stream(client, SHORT_PROMPT)
        wait_until(lambda: len(stream.deltas) > 5, "token 6")
        name = node_with(two_decode_nodes, "d", lambda n: n.num_requests > 0)
        engine_id = described_nodes(two_decode_nodes)[name].engine_id
        send(two_decode_nodes, name, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            wait_until(lambda: described_nodes(two_decode_nodes)[name].lost, "lost")
            assert time.monotonic() - stopped_at < 2.0
            assert stream.end() == expected[len(SHORT_PROMPT)]
        finally:
            send(two_decode_nodes, name, signal.SIGCONT)
        two_decode_nodes.wait_ready(20)  # every pair is connected again
        assert described_nodes(two_decode_nodes)[name].engine_id == engine_id
        for _ in range(4):  # both decode nodes have their turn
            assert Stream(client, SHORT_PROMPT).end() == expected[len(SHORT_PROMPT)]
        wait_until(lambda: all_blocks_free(two_decode_nodes), "all blocks free")


def all_blocks_free(deployment: LocalDeployment) -> bool:
    return all(
        node.beat.num_free_blocks == 400 and not node.beat.num_quarantined_blocks
        for node in described_nodes(deployment).values()
    )


def test_nodes_leave_a_router_that_is_stopped_and_join_it_again(
    two_prefill_nodes: LocalDeployment, expected: dict[int, tuple[int, ...]]
) -> None:
    log = two_prefill_nodes.child("d0").log.read_text(encoding="utf-8")
    [page] = re.findall(r"metrics at (http://\S+)", log)
    with Client(two_prefill_nodes.config.listen) as client:
        for name in ("p0", "p1"):  # so that the request stays on the decode node
            send(two_prefill_nodes, name, signal.SIGSTOP)
        stream = Stream(client, SHORT_PROMPT)
        try:
            wait_until(lambda: num_requests(page) == 1, "the request on d0")
            send(two_prefill_nodes, "router", signal.SIGSTOP)
            stopped_at = time.monotonic()
            wait_until(lambda: num_requests(page) == 0, "the end of the request on d0")
            assert time.monotonic() - stopped_at < 4.0  # nobody could be told of its tokens
        finally:
            for name in ("p0", "p1", "router"):
                send(two_prefill_nodes, name, signal.SIGCONT)
        # To the client nothing has happened: the router places the call anew.
        assert stream.end() == expected[len(SHORT_PROMPT)]


def num_requests(page: str) -> int:
    """Open requests of a node, as its metrics page says: its router cannot be asked."""
    with urllib.request.urlopen(page, timeout=20) as response:
        text = response.read().decode()
    counts = re.findall(r"^baton_requests\{.*\} (\S+)$", text, re.MULTILINE)
    assert len(counts) == 3
    return int(sum(map(float, counts)))
