"""Prompts with images over real processes get the tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.processes.deployments import complete_all, run_deployment
from tests.numerics.test_images_equal_transformers import (
    GREEDY,
    assert_equal,
    block_size,
    draw_parts,
    expected,
    prompt_of,
)
from tests.numerics.vision_checkpoints import (
    VISION_FAMILIES,
    VisionCheckpoint,
    file_of,
    make_vision_checkpoint,
)

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

RANKS = dict.fromkeys(VISION_FAMILIES, "1") | {"Qwen2_5_VLForConditionalGeneration": "2"}


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> VisionCheckpoint:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deployment(
    checkpoint: VisionCheckpoint, request: pytest.FixtureRequest
) -> Iterator[LocalDeployment]:
    """Blocks and chunks so small that images are several of both."""
    architecture = type(checkpoint.theirs).__name__
    with run_deployment(
        "--dtype",
        "float32",
        "--block-size",
        str(block_size(checkpoint)),
        "--long-prefill-token-threshold",
        "16",
        "--kv-cache-memory",
        "64M",
        "--tensor-parallel-size",
        RANKS[architecture],
        model=checkpoint.folder,
    ) as running:
        yield running


def as_files(prompt: dict[str, Any]) -> dict[str, Any]:
    return {**prompt, "images": [file_of(image) for image in prompt["images"]]}


def test_a_split_system_gives_the_tokens_of_transformers(
    deployment: LocalDeployment, checkpoint: VisionCheckpoint
) -> None:
    drawn = [draw_parts(checkpoint, 10 * num, num) for num in (0, 1, 2, 3, 4)]
    wanted = [expected(checkpoint, parts) for parts in drawn]
    prompts = [as_files(prompt_of(checkpoint, parts)) for parts in drawn]
    for is_first in (True, False):  # the second time both nodes know the prompts
        completions = complete_all(deployment, prompts, GREEDY)
        assert_equal(completions, wanted)
        if is_first:
            receipts = [one.receipt.prefill for one in completions if one.receipt is not None]
            assert any(one is not None and one.pixels_wait_s > 0 for one in receipts)
    for completion, parts in zip(completions, drawn, strict=True):
        assert completion.receipt is not None
        assert completion.receipt.num_images == len(parts) // 2
