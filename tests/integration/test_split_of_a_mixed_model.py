"""The split system equals one process for a model whose layers differ: two KV cache groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.processes.deployments import complete_all, split_deployment
from tests.numerics.tiny_models import make_hugging_face_model, save

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

WINDOW = 20
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_hugging_face_model(
        "Qwen3ForCausalLM",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_position_embeddings=400,
        initializer_range=0.5,
    )
    return save(model, tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Iterator[LocalDeployment]:
    """Blocks and chunks small enough to matter, and memory short enough to preempt or wait."""
    with split_deployment(
        folder, "--block-size", "4", "--long-prefill-token-threshold", "32", "--num-blocks", "450"
    ) as running:
        yield running


def test_split_equals_one_process_and_sends_only_what_the_window_needs(
    deployment: LocalDeployment, folder: Path
) -> None:
    prompts = [
        [(7 * i * i + 3 * i + 5 * k) % 61 for i in range(1 + 20 * (k % 10))] for k in range(20)
    ]
    alone = LLM(str(folder), dtype="float32", block_size=4, num_threads=1).generate(prompts, GREEDY)
    num_whole = 0
    for _ in range(2):  # the second time both nodes know prompts
        split = complete_all(deployment, prompts, GREEDY)
        assert [c.token_ids for c in split] == [c.token_ids for c in alone]
        for prompt, completion in zip(prompts, split, strict=True):
            assert completion.receipt is not None
            decode = completion.receipt.decode
            assert decode is not None
            if completion.receipt.num_attempts > 1 or decode.num_cached_tokens:
                continue  # it was preempted and went on elsewhere, or a part was there already
            num_whole += 1
            num_blocks = -(-len(prompt) // 4)
            num_slid_out = max(len(prompt) - WINDOW + 1, 0) // 4
            assert decode.push.num_blocks == 2 * num_blocks - num_slid_out
    assert num_whole >= 5
