"""Real processes: prefill nodes fetch what decode nodes wrote, or other prefill nodes computed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from baton import LLM, Client, SamplingParams
from baton.api.outputs import Completion
from baton.deployment.local_deployment import LocalDeployment
from baton.processes.free_address import free_address
from baton.v1 import admin_pb2
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import (
    described_nodes,
    held_by,
    open_admin,
    run_deployment,
    wait_for_beats,
)
from tests.fakes.time.waiting import wait_until
from tests.integration.test_audit import audit
from tests.integration.test_encode_node import figure

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

METRICS = free_address()
BLOCK, NUM_NEW, NUM_OUT, NUM_TURNS = 16, 60, 90, 4
PARAMS = SamplingParams(max_tokens=NUM_OUT, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32")


@pytest.fixture(scope="module")
def deployment() -> Iterator[LocalDeployment]:
    with run_deployment(
        *("--fetch-prefixes", "--num-blocks", "600", "--kv-digests"),
        # A prompt takes longer than its fetch, although the model is tiny.
        *("--long-prefill-token-threshold", "4"),
        num_decode=2,
        prefill_args=["--metrics-listen", METRICS],
        decode_args=["--local-prefill-threshold", "0"],
    ) as running:
        yield running


@pytest.fixture(scope="module")
def two_prefills() -> Iterator[LocalDeployment]:
    """Run two prefill nodes, which get prompts in turn, and a decode node."""
    with run_deployment(
        *("--fetch-prefixes", "--num-blocks", "600", "--kv-digests"),
        *("--long-prefill-token-threshold", "4"),
        num_prefill=2,
        router_args=("--policy", "round_robin"),
    ) as running:
        yield running


def new_part(seed: int, turn: int) -> list[int]:
    return [5 + (7 * seed + 11 * turn + 3 * place) % 200 for place in range(NUM_NEW)]


def say(
    deployment: LocalDeployment, prompt: list[int], params: SamplingParams = PARAMS
) -> Completion:
    with Client(deployment.config.listen) as client:
        return client.generate(prompt, params, timeout_s=60)


def assert_right(
    llm: LLM, prompt: list[int], completion: Completion, params: SamplingParams = PARAMS
) -> None:
    assert completion.token_ids == llm.generate([prompt], params)[0].token_ids


def assert_nothing_is_left(deployment: LocalDeployment) -> None:
    """Wait until no node has a request or a transfer, and each block has an owner."""

    def is_empty() -> bool:
        try:
            nodes = described_nodes(deployment)
            names = [name for name, node in nodes.items() if not node.lost]
            return not any(node.beat.num_transfers for node in nodes.values()) and not any(
                held_by(deployment, name).requests for name in names
            )
        except grpc.RpcError:  # a node of a busy machine joins again
            return False

    wait_until(is_empty, "no open request and fetch on any node", timeout_s=30)
    output = audit(deployment.config.listen)
    assert output.count("of them with an owner") == len(described_nodes(deployment)), output


def test_only_new_tokens_are_computed(deployment: LocalDeployment, llm: LLM) -> None:
    prompt = new_part(1, 0)
    fetched = num_exact = 0
    for turn in range(1, NUM_TURNS + 1):
        completion = say(deployment, prompt)
        assert_right(llm, prompt, completion)
        assert completion.receipt is not None
        prefill = completion.receipt.prefill
        assert prefill is not None
        assert prefill.num_computed_tokens + prefill.num_cached_tokens == len(prompt)
        # On a machine that stands still for a second, a turn is tried again on another node, or its
        # fetch is lost. The last token of a turn is not computed before the next turn.
        known = (len(prompt) - NUM_NEW - 1) // BLOCK * BLOCK
        is_fetched = prefill.num_fetched_tokens > NUM_OUT - BLOCK
        num_exact += is_fetched and prefill.num_cached_tokens == known
        fetched += prefill.num_fetched_tokens
        prompt += [*completion.token_ids, *new_part(1, turn)]
        wait_for_beats(deployment)
    assert num_exact >= 1
    assert figure(METRICS, "baton_fetched_tokens_total") >= fetched > 0
    assert_nothing_is_left(deployment)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_nodes_of_several_ranks_fetch(ranks: tuple[int, int], llm: LLM) -> None:
    p_ranks, d_ranks = (["--tensor-parallel-size", str(num)] for num in ranks)
    with run_deployment(
        *("--fetch-prefixes", "--num-blocks", "600", "--kv-digests"),
        *("--long-prefill-token-threshold", "4"),
        prefill_args=p_ranks,
        decode_args=[*d_ranks, "--local-prefill-threshold", "0"],
    ) as running:
        prompt, fetched = new_part(5, 0), []
        for turn in range(1, 4):
            completion = say(running, prompt)
            assert_right(llm, prompt, completion)
            assert completion.receipt is not None
            assert completion.receipt.prefill is not None
            fetched.append(completion.receipt.prefill.num_fetched_tokens)
            prompt += [*completion.token_ids, *new_part(5, turn)]
            wait_for_beats(running)
        assert fetched[0] == 0
        assert min(fetched[1:]) > NUM_OUT - BLOCK


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_prompts_go_on_without_their_holder(
    deployment: LocalDeployment, llm: LLM, number: signal.Signals
) -> None:
    for seed in range(4):
        prompt = new_part(10 * int(number) + seed, 0)
        first = say(deployment, prompt)
        assert_right(llm, prompt, first)
        assert first.receipt is not None
        holder = first.receipt.decode_node
        prompt += [*first.token_ids, *new_part(10 * int(number) + seed, 1)]
        wait_for_beats(deployment)
        child = deployment.child(holder)
        timer = threading.Timer(0.006 * (seed + 1), child.process.send_signal, (number,))
        timer.start()
        began_at = time.monotonic()
        second = say(deployment, prompt)
        assert_right(llm, prompt, second)
        assert time.monotonic() - began_at < 25, "the holder's end costs seconds only"
        timer.join()
        if number is signal.SIGSTOP:
            child.process.send_signal(signal.SIGCONT)
        else:
            deployment.restart(holder)
        deployment.wait_ready(60)
        assert_nothing_is_left(deployment)


FIRST = SamplingParams(max_tokens=1, temperature=0.0)  # so no decode node gets the prompt's KV
SECOND = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def explained(deployment: LocalDeployment, request_id: str) -> admin_pb2.DecisionDescription:
    with open_admin(deployment) as admin:
        request = admin_pb2.ExplainRequest(request_id=request_id)
        found: admin_pb2.DecisionDescription = admin.Explain(request, timeout=20).decisions[-1]
    return found


def test_a_prefill_node_fetches_from_another(two_prefills: LocalDeployment, llm: LLM) -> None:
    num_exact = 0
    for seed in range(20, 32):  # the ends for prefixes may not be connected at first
        prompt = [token for turn in range(4) for token in new_part(seed, turn)]
        first = say(two_prefills, prompt, FIRST)
        assert first.receipt is not None
        time.sleep(0.3)  # the router learns what the prefill node has cached
        longer = [*prompt, *new_part(seed, 4)]
        second = say(two_prefills, longer, SECOND)
        assert_right(llm, longer, second, SECOND)
        assert second.receipt is not None
        prefill = second.receipt.prefill
        assert prefill is not None
        assert prefill.num_computed_tokens + prefill.num_cached_tokens == len(longer)
        known = len(prompt) // BLOCK * BLOCK
        if second.receipt.prefill_node == first.receipt.prefill_node:
            continue  # an attempt was repeated, as the machine stood still
        if prefill.num_fetched_tokens == prefill.num_cached_tokens == known:
            num_exact += 1
            (source,) = explained(two_prefills, second.request_id).prefix_sources
            assert (source.node, source.num_tokens) == (first.receipt.prefill_node, known)
            assert 0 < source.fetch_ms < source.compute_ms
            assert source.is_chosen
        if num_exact == 2:
            break
    assert num_exact == 2
    assert_nothing_is_left(two_prefills)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_prompts_go_on_without_the_other_prefill_node(
    two_prefills: LocalDeployment, llm: LLM, number: signal.Signals
) -> None:
    for seed in range(4):
        prompt = [one for turn in range(4) for one in new_part(40 + 10 * int(number) + seed, turn)]
        first = say(two_prefills, prompt, FIRST)
        assert first.receipt is not None
        holder = two_prefills.child(first.receipt.prefill_node)
        time.sleep(0.3)
        longer = [*prompt, *new_part(90 + seed, 4)]
        timer = threading.Timer(0.006 * (seed + 1), holder.process.send_signal, (number,))
        timer.start()
        second = say(two_prefills, longer, SECOND)
        assert_right(llm, longer, second, SECOND)
        timer.join()
        if number is signal.SIGSTOP:
            holder.process.send_signal(signal.SIGCONT)
        else:
            two_prefills.restart(holder.name)
        two_prefills.wait_ready(60)
        assert_nothing_is_left(two_prefills)
