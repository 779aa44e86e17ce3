"""Tests of split systems of all kinds of KV, weights and ranks: equal tokens, minimal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import Completion, SamplingParams
from engine import LLM
from tests.fakes.processes.deployments import complete_all, run_deployment
from tests.fakes.processes.rank_processes import is_running, ranks_of
from tests.fakes.system.split_cases import SPLIT_CASES, SplitCase, rank_args
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
KV_MEMORY = 2**25


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.lengthy] if case.is_lengthy else [], id=case.name)
        for case in SPLIT_CASES
    ],
)
def test_split_equals_one_process_and_sends_only_what_is_needed(
    case: SplitCase, tmp_path: Path
) -> None:
    model, prompts = case.make(tmp_path), case.prompts()
    llm = LLM(str(model), dtype="float32", num_threads=1, kv_cache_bytes=KV_MEMORY, **case.options)
    alone = llm.generate(prompts, PARAMS)
    shared_before = set(Path("/dev/shm").iterdir())
    with run_deployment(
        *case.arguments(),
        model=model,
        prefill_args=rank_args(case.prefill),
        decode_args=rank_args(case.decode),
    ) as running:
        first = complete_all(running, prompts, PARAMS)
        again = complete_all(running, prompts, PARAMS)  # both nodes know the prompts
        processes = [pid for name in ("p0", "d0") for pid in ranks_of(running, name)]
    for split in (first, again):
        assert_equal(case, split, alone)
    num_whole = sum(map(is_whole, first))
    assert num_whole * 4 >= len(prompts) if case.may_preempt else num_whole == len(prompts)
    for prompt, completion in zip(prompts * 2, first + again, strict=True):
        if is_whole(completion):
            assert_sent(case, len(prompt), completion)
    wait_until(lambda: not any(map(is_running, processes)), "all ranks have ended")
    if case.has_ranks:
        assert set(Path("/dev/shm").iterdir()) <= shared_before


def assert_equal(case: SplitCase, split: list[Completion], alone: list[Completion]) -> None:
    """Compare tokens and logprobs; ranks sum in another order."""
    assert [one.token_ids for one in split] == [one.token_ids for one in alone]
    error = 1e-3 if case.has_ranks else 1e-5
    for mine, theirs in zip(split, alone, strict=True):
        ours = [logprob.logprob for logprob in mine.logprobs]
        assert ours == pytest.approx([one.logprob for one in theirs.logprobs], abs=error)


def is_whole(completion: Completion) -> bool:
    """Return whether the decode node got all blocks of the prompt, in one attempt."""
    receipt = completion.receipt
    assert receipt is not None
    assert receipt.decode is not None
    return receipt.num_attempts == 1 and not receipt.decode.num_cached_tokens


def assert_sent(case: SplitCase, num_tokens: int, completion: Completion) -> None:
    """Check the blocks, bytes and descriptors of a whole prompt's hand-off."""
    assert completion.receipt is not None
    assert completion.receipt.decode is not None
    push = completion.receipt.decode.push
    assert push.num_blocks == case.num_sent_blocks(num_tokens)
    if case.token_bytes:
        assert push.num_bytes == push.num_blocks * case.block_size * case.token_bytes
    if "heads" in case.node_args:
        assert push.num_descriptors <= push.num_blocks * max(case.prefill[0], case.decode[0])
