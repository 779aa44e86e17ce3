"""Models in which the tokens of an image see each other: one step computes all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.api.errors import InvalidRequestError
from baton.engine_config import EngineConfig
from engine import LLM
from engine.worker.device_choice import without_images_if_needed
from models.config import ModelConfig
from tests.numerics.test_images_equal_transformers import (
    GREEDY,
    NUM_TOKENS,
    WHOLE,
    assert_equal,
    draw_parts,
    expected,
    image,
    load,
    prompt_of,
)
from tests.numerics.vision_checkpoints import VisionCheckpoint, make_vision_checkpoint

IMAGE_TOKENS = 18  # marks included


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    return make_vision_checkpoint(WHOLE, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(checkpoint: VisionCheckpoint) -> tuple[list[Any], list[list[int]]]:
    """Prompts with 0 to 4 images, and their tokens."""
    drawn = [draw_parts(checkpoint, 10 * num, num) for num in (0, 1, 2, 3, 4)]
    return (
        [prompt_of(checkpoint, parts) for parts in drawn],
        [expected(checkpoint, parts) for parts in drawn],
    )


@torch.inference_mode()
def test_these_checkpoints_tell_whether_images_are_seen_whole(
    checkpoint: VisionCheckpoint,
) -> None:
    picture = image(0)
    text = f"ab{checkpoint.expanded_text(picture)}cd"
    ids = torch.tensor([checkpoint.tokenizer(text, add_special_tokens=False).input_ids])
    types = (ids == checkpoint.theirs.config.image_token_id).int()
    inputs = checkpoint.model_inputs(picture)
    whole = checkpoint.theirs(ids, token_type_ids=types, **inputs).logits
    causal = checkpoint.theirs(ids, **inputs).logits
    assert (whole - causal).abs().max() > 0.1


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("room", [0, 5])
def test_images_wait_for_a_step_with_room(
    checkpoint: VisionCheckpoint,
    prompts: tuple[list[Any], list[list[int]]],
    room: int,
    runs_ahead: bool,
) -> None:
    asked, wanted = prompts
    llm = load(
        checkpoint,
        block_size=4,
        num_blocks=1600,
        max_num_requests=5,
        max_num_batched_tokens=IMAGE_TOKENS + 4 + room,
        prefill_tokens_beside_decodes=1,
        async_scheduling=runs_ahead,
    )
    assert_equal(llm.generate(asked * 2, GREEDY), wanted * 2)


@pytest.mark.parametrize("size", [8, 16])
def test_a_hit_may_end_within_an_image(checkpoint: VisionCheckpoint, size: int) -> None:
    llm = load(checkpoint, block_size=size, num_blocks=1600)
    within, found, wanted = 0, [], []
    for before in ("x", "xy", "xyz", "xyzw", "xyzwv"):
        llm.generate([prompt_of(checkpoint, [before, image(0), "uvw"])], GREEDY)
        cached = llm.metrics().cached_prompt_tokens_total
        parts = [before, image(0), "abc"]
        found += llm.generate([prompt_of(checkpoint, parts)], GREEDY)
        wanted.append(expected(checkpoint, parts))
        hit = llm.metrics().cached_prompt_tokens_total - cached
        first = len(before) + 1  # behind the line ends
        within += first + 1 < hit < first + IMAGE_TOKENS - 1
    assert within > 0
    assert_equal(found, wanted)


def test_an_image_that_fits_no_step_is_refused(checkpoint: VisionCheckpoint) -> None:
    llm = load(checkpoint, max_num_requests=4, max_num_batched_tokens=IMAGE_TOKENS + 2)
    problem = (
        r"images\[0\]: has 18 tokens, of which a step fits at most 17 "
        r"\(max_num_batched_tokens - max_num_requests \+ 1\)"
    )
    with pytest.raises(InvalidRequestError, match=problem):
        llm.generate([prompt_of(checkpoint, ["a", image(0), "b"])], GREEDY)
    assert len(llm.generate(["abc"], GREEDY)[0].token_ids) == NUM_TOKENS


def test_prompts_without_images_need_no_encoder(
    checkpoint: VisionCheckpoint, prompts: tuple[list[Any], list[list[int]]]
) -> None:
    asked, wanted = prompts
    llm = LLM(str(checkpoint.folder), dtype="float32", num_blocks=100, images=False)
    assert_equal(llm.generate(asked[:1], GREEDY), wanted[:1])
    with pytest.raises(InvalidRequestError, match="this model is text only"):
        llm.generate(asked[1:2], GREEDY)


def test_backends_that_only_look_back_take_no_images(
    checkpoint: VisionCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    model, cpu = ModelConfig.from_folder(checkpoint.folder), torch.device("cpu")
    for name in ("auto", "reference", "cpu", "native"):
        assert without_images_if_needed(EngineConfig(attention_backend=name), cpu, model).images
    assert not caplog.records
    looks_back = EngineConfig(attention_backend="triton")
    assert not without_images_if_needed(looks_back, cpu, model).images
    [record] = caplog.records
    assert record.getMessage() == (
        "prompts may have no images: the tokens of an image see each other in this model, and "
        "attention backend triton on cpu only looks back; use a CPU"
    )
