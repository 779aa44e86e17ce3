"""Tests that prompts with images get transformers' tokens, also if cut, cached or preempted."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from baton.api.errors import InvalidRequestError
from baton.api.outputs import Completion, FinishReason
from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.offline.images import with_images
from models.vision.preprocess import Preprocessor
from tests.fakes.images.inline_pixels import decode_inline
from tests.numerics.vision_checkpoints import (
    VISION_FAMILIES,
    VisionCheckpoint,
    drawn_image,
    file_of,
    make_vision_checkpoint,
)

NUM_TOKENS = 6
# Float noise between two ways to sum is about 1e-5 of a logit; a token is certain beyond this.
CLEAR_CUT = 1e-3
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
QUICK = "SmolVLMForConditionalGeneration"
WHOLE = "Gemma3ForConditionalGeneration"  # one step computes all tokens of an image
LARGE = "Gemma4ForConditionalGeneration"  # like WHOLE; images have up to 70 tokens
# Model -> the name of the argument that marks the tokens of images.
TYPES = {WHOLE: "token_type_ids", LARGE: "mm_token_type_ids"}
SIZES = [(40, 30), (9, 70), (100, 37), (64, 64), (33, 32)]

Parts = Sequence[str | Image.Image]


@pytest.fixture(
    scope="module",
    params=[
        name if name == QUICK else pytest.param(name, marks=pytest.mark.large)
        for name in VISION_FAMILIES
    ],
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> VisionCheckpoint:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("model"))


def load(checkpoint: VisionCheckpoint, **options: Any) -> LLM:
    options = {"dtype": "float32", "num_blocks": 400, "max_num_requests": 8} | options
    llm = LLM(str(checkpoint.folder), num_threads=1, **options)
    decode_inline(llm.engine, _preprocessor(checkpoint.folder))
    return llm


@functools.cache
def _preprocessor(folder: Path) -> Preprocessor:
    return Preprocessor(folder)


def has_states(checkpoint: VisionCheckpoint) -> bool:
    return "Qwen3_5" in type(checkpoint.theirs).__name__


def keeps_images_whole(checkpoint: VisionCheckpoint) -> bool:
    return type(checkpoint.theirs).__name__ in TYPES


def block_size(checkpoint: VisionCheckpoint) -> int:
    """Return a block size with which images are several blocks, if the model allows it."""
    return 16 if has_states(checkpoint) else 4


def prompt_of(checkpoint: VisionCheckpoint, parts: Parts) -> Any:
    images = [part for part in parts if not isinstance(part, str)]
    texts = (part if isinstance(part, str) else checkpoint.marker for part in parts)
    return {"prompt": "".join(texts), "images": images}


def image(index: int) -> Image.Image:
    return drawn_image(*SIZES[index % len(SIZES)], seed=index)


def draw_parts(checkpoint: VisionCheckpoint, seed: int, num_images: int) -> list[str | Image.Image]:
    """Draw a prompt; two images are never side by side, as between their marks in chats."""
    draw = random.Random(seed)
    parts: list[str | Image.Image] = []
    for index in range(num_images):
        parts += ["".join(draw.choices("abcdef", k=draw.randint(1, 9))), image(seed + index)]
    return [*parts, "".join(draw.choices("uvwxyz", k=draw.randint(1, 9)))]


@torch.inference_mode()
def expected(checkpoint: VisionCheckpoint, parts: Parts) -> list[int]:
    """Return greedy tokens of transformers, as far as each is certain."""
    texts = (part if isinstance(part, str) else checkpoint.expanded_text(part) for part in parts)
    ids = checkpoint.tokenizer("".join(texts), add_special_tokens=False).input_ids
    images = [part for part in parts if not isinstance(part, str)]
    inputs = checkpoint.model_inputs(*images) if images else {}
    input_ids = torch.tensor([ids])
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = _types(checkpoint, input_ids)
    elif images and keeps_images_whole(checkpoint):
        inputs[TYPES[type(checkpoint.theirs).__name__]] = _types(checkpoint, input_ids)
    result = checkpoint.theirs.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    best = torch.stack(result.logits).squeeze(1).topk(2).values  # [num_tokens, 2]
    is_certain = (best[:, 0] - best[:, 1] > CLEAR_CUT).tolist()
    num_certain = (*is_certain, False).index(False)
    tokens: list[int] = result.sequences[0, len(ids) :].tolist()
    return tokens[:num_certain]


def _types(checkpoint: VisionCheckpoint, input_ids: torch.Tensor) -> torch.Tensor:
    placeholder: int = checkpoint.theirs.config.image_token_id
    return (input_ids == placeholder).int()


def assert_equal(found: Sequence[Completion], wanted: Sequence[list[int]]) -> None:
    for completion, tokens in zip(found, wanted, strict=True):
        assert completion.finish_reason is FinishReason.LENGTH
        assert list(completion.token_ids)[: len(tokens)] == tokens
    assert sum(map(len, wanted)) >= len(wanted) * NUM_TOKENS // 3, "too little was compared"


@pytest.fixture(scope="module")
def prompts(checkpoint: VisionCheckpoint) -> tuple[list[Any], list[list[int]]]:
    """Prompts with 0 to 4 images, and their tokens."""
    drawn = [draw_parts(checkpoint, 10 * num, num) for num in (0, 1, 2, 3, 4)]
    return (
        [prompt_of(checkpoint, parts) for parts in drawn],
        [expected(checkpoint, parts) for parts in drawn],
    )


def test_prompts_with_images_get_the_tokens_of_transformers(
    checkpoint: VisionCheckpoint, prompts: tuple[list[Any], list[list[int]]]
) -> None:
    asked, wanted = prompts
    llm = load(checkpoint)
    assert_equal(llm.generate(asked, GREEDY), wanted)
    encoded = llm.metrics().images_encoded_total
    assert encoded == 10
    assert_equal(llm.generate(asked, GREEDY), wanted)  # from the prefix cache
    assert llm.metrics().images_encoded_total == encoded


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_end_within_images(
    checkpoint: VisionCheckpoint, prompts: tuple[list[Any], list[list[int]]], chunk: int
) -> None:
    asked, wanted = prompts
    size = block_size(checkpoint)
    llm = load(checkpoint, long_prefill_token_threshold=chunk, block_size=size, num_blocks=1600)
    assert_equal(llm.generate(asked[1:3], GREEDY), wanted[1:3])


def test_hits_end_within_images_and_behind_them(checkpoint: VisionCheckpoint) -> None:
    llm = load(checkpoint, block_size=block_size(checkpoint), num_blocks=1600)
    one, other = image(0), image(2)
    prompts: list[Parts] = [
        ["ab", one, "cd", other, "ef"],
        ["ab", one, "cdx"],
        ["ab", one, "cd", image(4), "ef"],
        ["ab", one, "cd", other, "efghijklmnopqrstuvwx"],
    ]
    for text in ("x", "xy", "xyz", "xyzw"):  # the texts behind the image begin at other places
        prompts += [[text, one, "ef"], [text, one, "gh"]]
    for parts in prompts:
        asked = prompt_of(checkpoint, parts)
        assert_equal(llm.generate(asked, GREEDY), [expected(checkpoint, parts)])
    assert llm.metrics().cached_prompt_tokens_total > 0


def test_preempted_requests_compute_their_images_again(
    checkpoint: VisionCheckpoint, prompts: tuple[list[Any], list[list[int]]]
) -> None:
    if has_states(checkpoint):
        pytest.skip("its requests wait for blocks instead")
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    chosen = [1, 2, 3]
    if type(checkpoint.theirs).__name__ == LARGE:
        chosen = [1] * 4  # prompts with more images wait for blocks instead
    asked, wanted = ([one[index] for index in chosen] for one in prompts)
    alone = load(checkpoint, prefix_cache=False)
    lengths = [len(c.token_ids) for c in alone.generate(asked, GREEDY)]
    assert lengths == [NUM_TOKENS] * len(asked)
    num_tokens = max(len(alone.engine.requests), alone.metrics().prompt_tokens_computed_total)
    few = num_tokens // 16 + 8
    if keeps_images_whole(checkpoint):
        few += 13  # layers with a window need blocks of their own
    llm = load(checkpoint, prefix_cache=False, num_blocks=few, block_size=16)
    found = llm.generate(asked, long)
    assert llm.metrics().preemptions_total > 0
    for completion, tokens in zip(found, wanted, strict=True):
        assert list(completion.token_ids)[: len(tokens)] == tokens


def test_an_image_in_many_prompts_is_encoded_once(checkpoint: VisionCheckpoint) -> None:
    llm = load(checkpoint)
    shared = image(3)
    prompts: list[Parts] = [[letter, shared, "z"] for letter in "abcdefgh"]
    found = llm.generate([prompt_of(checkpoint, parts) for parts in prompts], GREEDY)
    assert_equal(found, [expected(checkpoint, parts) for parts in prompts])
    assert llm.metrics().images_encoded_total == 1


def test_chats_are_tokenized_as_by_the_processor(checkpoint: VisionCheckpoint) -> None:
    llm = load(checkpoint)
    parts = [{"type": "text", "text": "a\n"}, {"type": "image", "image": image(1)}]
    parts.append({"type": "text", "text": "\nb"})
    [prompt] = llm.encode_chats([{"role": "user", "content": parts}])
    assert isinstance(prompt, dict)
    token_ids = prompt["prompt"]
    assert isinstance(token_ids, list)
    found, _ = with_images(token_ids, prompt["images"], llm.engine.features.images.layout)
    text = f"user:a\n{checkpoint.expanded_text(image(1))}\nbassistant:"
    assert found == checkpoint.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.large
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_ranks_encode_for_themselves(
    checkpoint: VisionCheckpoint, prompts: tuple[list[Any], list[list[int]]], kind: str
) -> None:
    asked, wanted = prompts
    llm = load(checkpoint, **{f"{kind}_parallel_size": 2})
    assert_equal(llm.generate(asked, GREEDY), wanted)
    llm.engine.close()


@pytest.mark.large
def test_media_processes_decode_images(
    checkpoint: VisionCheckpoint, prompts: tuple[list[Any], list[list[int]]]
) -> None:
    asked, wanted = prompts
    llm = LLM(str(checkpoint.folder), dtype="float32", num_blocks=400, num_threads=1)
    broken = {"prompt": asked[1]["prompt"], "images": [file_of(image(0))[:200]]}
    *found, failed = llm.generate([*asked, broken], GREEDY)
    assert_equal(found, wanted)
    assert failed.finish_reason is FinishReason.ABORT
    messages = [{"role": "user", "content": [{"type": "image", "image": image(1)}]}]
    assert len(llm.chat(messages, GREEDY)[0].token_ids) == NUM_TOKENS
    llm.engine.close()


def test_images_that_do_not_fit_a_prompt_are_refused(checkpoint: VisionCheckpoint) -> None:
    llm = load(checkpoint)
    marker = checkpoint.marker
    cases: list[tuple[Any, str]] = [
        ({"prompt": "ab", "images": [image(0)]}, "images: the prompt must have one"),
        ({"prompt": marker, "images": [b"no image"]}, r"images\[0\]: "),
        ({"prompt": marker, "images": [3]}, r"images\[0\]: must be an image of Pillow"),
    ]
    for prompt, problem in cases:
        with pytest.raises(InvalidRequestError, match=problem):
            llm.generate([prompt], GREEDY)
    assert not llm.engine.requests
