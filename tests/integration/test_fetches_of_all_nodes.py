"""Tests with real processes: all roles of nodes fetch all kinds of KV between any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton import LLM, Client, SamplingParams
from baton.api.outputs import Completion
from baton.deployment.local_deployment import LocalDeployment
from baton.v1 import admin_pb2
from tests.fakes.processes.deployments import (
    described_nodes,
    open_admin,
    run_deployment,
    wait_for_beats,
)
from tests.fakes.system.split_cases import SPLIT_CASES, SplitCase
from tests.fakes.time.waiting import wait_until
from tests.integration.test_fetched_prefixes import assert_nothing_is_left

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

NUM_NEW, NUM_OUT, NUM_TURNS = 40, 40, 3
PARAMS = SamplingParams(max_tokens=NUM_OUT, temperature=0.0, ignore_eos=True)
CASES = {case.name: case for case in SPLIT_CASES}
# No latents: their model has 64 positions, too few for a fetch to save time;
# `test_fetches_of_ranks.py` tests latents.
HEADS, WINDOWS, FP8 = (
    SplitCase(name="heads"),
    CASES["layers with and without a window"],
    CASES["fp8 cache"],
)
# Arguments that make a prompt slower than its fetch, although the models are tiny.
ARGS = ("--fetch-prefixes", "--num-blocks", "600", "--long-prefill-token-threshold", "4")


def new_part(case: SplitCase, seed: int, turn: int) -> list[int]:
    num_usual = min(case.vocabulary, 200) - 5
    return [5 + (7 * seed + 11 * turn + 3 * place) % num_usual for place in range(NUM_NEW)]


def load(case: SplitCase, folder: Path) -> tuple[LLM, Path]:
    model = case.make(folder)
    return LLM(str(model), dtype="float32", num_threads=1, **case.options), model


def node_args(case: SplitCase) -> list[str]:
    found = list(ARGS)
    for name, value in case.options.items():
        found += [f"--{name.replace('_', '-')}", str(value)]
    return found


def check_turn(running: LocalDeployment, llm: LLM, prompt: list[int]) -> Completion:
    """Send a turn; compare its answer with the answer of one process."""
    with Client(running.config.listen) as client:
        completion = client.generate(prompt, PARAMS, timeout_s=60)
    assert completion.token_ids == llm.generate([prompt], PARAMS)[0].token_ids
    return completion


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(HEADS, (4, 1)), (HEADS, (2, 4)), (WINDOWS, (1, 2)), (FP8, (1, 4))],
    ids=lambda one: one.name if isinstance(one, SplitCase) else str(one),
)
def test_prefill_nodes_fetch_from_decode_nodes(
    case: SplitCase, ranks: tuple[int, int], tmp_path: Path
) -> None:
    llm, model = load(case, tmp_path)
    p_ranks, d_ranks = (["--tensor-parallel-size", str(num)] for num in ranks)
    with run_deployment(
        *node_args(case),
        model=model,
        prefill_args=p_ranks,
        decode_args=[*d_ranks, "--local-prefill-threshold", "0"],
    ) as running:
        prompt, fetched = new_part(case, 5, 0), []
        for turn in range(1, NUM_TURNS + 1):
            completion = check_turn(running, llm, prompt)
            assert completion.receipt is not None
            assert completion.receipt.prefill is not None
            fetched.append(completion.receipt.prefill.num_fetched_tokens)
            prompt += [*completion.token_ids, *new_part(case, 5, turn)]
            wait_for_beats(running)
        assert fetched[0] == 0
        assert max(fetched[1:]) >= NUM_OUT - case.block_size


def drain(running: LocalDeployment, name: str, *, resume: bool = False) -> None:
    with open_admin(running) as admin:
        (admin.Resume if resume else admin.Drain)(admin_pb2.NodeRequest(node=name), timeout=20)
    wait_until(
        lambda: bool(described_nodes(running)[name].beat.serving_state) is not resume,
        f"{name} {'serves' if resume else 'has drained'}",
    )


@pytest.mark.parametrize("case", [HEADS, WINDOWS], ids=lambda case: case.name)
def test_a_session_leaves_a_drained_decode_node_with_its_kv(
    case: SplitCase, tmp_path: Path
) -> None:
    """A decode node that computes a prompt computes only the new tokens, and fetches the others."""
    llm, model = load(case, tmp_path)
    settings: dict[str, Any] = {"num_prefill": 0, "num_decode": 2, "local_prefill": True}
    with run_deployment(*node_args(case), "--kv-digests", model=model, **settings) as running:
        prompt, node, fetched = new_part(case, 3, 0), "", list[int]()
        for turn in range(1, NUM_TURNS + 1):
            completion = check_turn(running, llm, prompt)
            receipt = completion.receipt
            assert receipt is not None
            assert receipt.decode is not None
            assert receipt.prefill is None
            assert receipt.decode_node != node
            fetched.append(receipt.decode.num_fetched_tokens)
            computed = receipt.decode.num_prompt_tokens_computed
            assert computed + receipt.decode.num_cached_tokens == len(prompt)
            if node:
                drain(running, node, resume=True)
            node = receipt.decode_node
            prompt += [*completion.token_ids, *new_part(case, 3, turn)]
            wait_for_beats(running)
            drain(running, node)
        assert fetched[0] == 0
        assert max(fetched[1:]) >= NUM_OUT - case.block_size
        drain(running, node, resume=True)
        assert_nothing_is_left(running)
