"""Images over real processes: the packages `openai` and `anthropic` as they are, and gRPC.

A tiny random SmolVLM with a router, a prefill node and a decode node. The tokens are those of
transformers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import torch
from PIL import Image

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.processes.deployments import run_deployment
from tests.numerics.vision_checkpoints import (
    VisionCheckpoint,
    drawn_image,
    make_vision_checkpoint,
)

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(240)]

MODEL = "tiny"
NUM_TOKENS = 8
SIZES = ((40, 30), (17, 64))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    folder = tmp_path_factory.mktemp("vision")
    return make_vision_checkpoint("SmolVLMForConditionalGeneration", folder)


@pytest.fixture(scope="module")
def fleet(checkpoint: VisionCheckpoint) -> Iterator[LocalDeployment]:
    with run_deployment(
        "--block-size",
        "4",
        "--kv-cache-memory",
        "64M",
        model=checkpoint.folder,
        http=True,
        router_args=["--served-model-name", MODEL, "--generation-config", "none"],
    ) as running:
        yield running


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    return [drawn_image(*size, seed=i) for i, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def openai_client(fleet: LocalDeployment) -> Iterator[openai.OpenAI]:
    url = f"http://{fleet.config.http_listen}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


def file_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def base64_of(image: Image.Image) -> str:
    return base64.b64encode(file_of(image)).decode()


def parts_of(images: list[Image.Image]) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64_of(image)}" for image in images]
    return [
        {"type": "text", "text": "look "},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        {"type": "text", "text": " now"},
    ]


def expected(checkpoint: VisionCheckpoint, images: list[Image.Image]) -> tuple[list[int], str]:
    """Return the prompt's tokens and the greedy output's text by transformers."""
    marks = "".join(checkpoint.family.expand(checkpoint.process(image)) for image in images)
    text = f"user:look {marks} nowassistant:"  # templates lose line ends behind tags
    ids: list[int] = checkpoint.tokenizer(text, add_special_tokens=False).input_ids
    with torch.inference_mode():
        found = checkpoint.theirs.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            **checkpoint.model_inputs(*images),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    tokens = found[0, len(ids) :].tolist()
    return ids, checkpoint.tokenizer.decode(tokens, skip_special_tokens=True)


GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS}
FORCED = {"ignore_eos": True, "min_tokens": NUM_TOKENS}


@pytest.mark.parametrize("num_images", [1, 2])
def test_openai_streamed_or_not_says_what_transformers_says(
    openai_client: openai.OpenAI,
    checkpoint: VisionCheckpoint,
    images: list[Image.Image],
    num_images: int,
) -> None:
    ids, text = expected(checkpoint, images[:num_images])
    messages: Any = [{"role": "user", "content": parts_of(images[:num_images])}]
    more = {**FORCED, "include_receipt": True}
    answer = openai_client.chat.completions.create(messages=messages, **GREEDY, extra_body=more)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == text
    (receipt,) = answer.model_extra["baton"]["receipts"]
    assert receipt["num_images"] == num_images
    assert receipt["decode_node"]
    chunks = openai_client.chat.completions.create(
        messages=messages, **GREEDY, stream=True, extra_body=FORCED
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == text


def test_responses_and_messages_say_the_same(
    fleet: LocalDeployment,
    openai_client: openai.OpenAI,
    checkpoint: VisionCheckpoint,
    images: list[Image.Image],
) -> None:
    (image, *_), text = images, expected(checkpoint, images[:1])[1]
    url = f"data:image/png;base64,{base64_of(image)}"
    content: Any = [
        {"type": "input_text", "text": "look "},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": " now"},
    ]
    response = openai_client.responses.create(
        model=MODEL, temperature=0, max_output_tokens=NUM_TOKENS,
        input=[{"role": "user", "content": content}], extra_body=FORCED,
    )  # fmt: skip
    assert response.output_text == text
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64_of(image)}
    blocks: Any = [
        {"type": "text", "text": "look "},
        {"type": "image", "source": source},
        {"type": "text", "text": " now"},
    ]
    base_url = f"http://{fleet.config.http_listen}"
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as claude:
        given: Any = {
            "model": MODEL,
            "max_tokens": NUM_TOKENS,
            "messages": [{"role": "user", "content": blocks}],
            "extra_body": {"temperature": 0},
        }
        message = claude.messages.create(**given)
        assert isinstance(message.content[0], anthropic.types.TextBlock)
        assert text.startswith(message.content[0].text)
        with claude.messages.stream(**given) as stream:
            assert stream.get_final_text() == message.content[0].text
        counted = claude.messages.count_tokens(model=MODEL, messages=given["messages"])
        assert counted.input_tokens == message.usage.input_tokens + (
            message.usage.cache_read_input_tokens or 0
        )


def test_grpc_says_the_same(
    fleet: LocalDeployment, checkpoint: VisionCheckpoint, images: list[Image.Image]
) -> None:
    ids, text = expected(checkpoint, images)
    params = SamplingParams(
        max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
    )
    parts = [
        {"type": "text", "text": "look "},
        *({"type": "image", "image": file_of(image)} for image in images),
        {"type": "text", "text": " now"},
    ]
    with Client(fleet.config.listen) as client:
        assert client.tokenize([{"role": "user", "content": parts}]) == ids
        completion = client.generate([{"role": "user", "content": parts}], params)
        assert completion.text == text
        again = client.generate([{"role": "user", "content": parts}], params)
        assert again.token_ids == completion.token_ids
        assert again.receipt is not None
        assert again.receipt.num_cached_tokens > 0  # blocks behind an image are found again


def test_a_file_whose_pixels_are_broken_is_one_line(
    openai_client: openai.OpenAI, images: list[Image.Image]
) -> None:
    """The router sees a whole header; the node that decodes the file refuses it."""
    half = file_of(images[0])[:-400]
    url = f"data:image/png;base64,{base64.b64encode(half).decode()}"
    content: Any = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as found:
        openai_client.chat.completions.create(
            messages=[{"role": "user", "content": content}], **GREEDY
        )
    assert "\n" not in found.value.message
    assert "image" in found.value.message
