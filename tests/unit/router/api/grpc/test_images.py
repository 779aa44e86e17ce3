"""Unit tests of images over gRPC: parts of chats, images of texts, and `baton.Client`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.client.messages import Prompt
from baton.link.words import PrefillCommand
from router.intake.images.image_options import ImageOptions
from tests.fakes.checkpoints.image_tokenizer import MARKER, image_tokenizer, rows_layout
from tests.fakes.outside.hostile_images import picture
from tests.fakes.router.grpc_scene import served

pytestmark = pytest.mark.medium

LIMITS = ImageOptions(max_images=2)
FILE = picture("PNG", (14, 14))
IMAGE = {"type": "image", "image": FILE}
TEXT = {"type": "text", "text": "see"}
PLACE, ROW = rows_layout().marker_token_id, rows_layout().row_token_id
PARAMS = SamplingParams(max_tokens=2)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_a_chat_a_text_and_token_ids_may_have_images() -> None:
    async def work() -> None:
        async with served(images=LIMITS) as (scene, client):
            (model,) = await client.models()
            assert model.image_marker == MARKER
            text = f"see {MARKER} here"
            token_ids = image_tokenizer().encode(text)
            url = "data:image/png;base64," + base64.b64encode(FILE).decode()
            linked = {"type": "image_url", "image_url": {"url": url}}
            prompts: list[Prompt] = [
                [{"role": "user", "content": [TEXT, IMAGE]}],
                [
                    {
                        "role": "user",
                        "content": [TEXT, linked],
                    }
                ],
                {"prompt": text, "images": [FILE]},
                {"prompt": token_ids, "images": [FILE]},
            ]
            for prompt in prompts:
                completion = await client.generate(prompt, PARAMS)
                receipt = completion.receipt
                assert receipt is not None
                assert (receipt.num_images, receipt.num_image_tokens) == (1, 2)
                assert await client.count_tokens(prompt) == receipt.num_prompt_tokens
            sent = [one for one in scene.prefill.commands if isinstance(one, PrefillCommand)]
            for command in sent:
                (image,) = command.images
                span = command.prompt_token_ids[image.span.first : image.span.end]
                assert (image.data, span) == (FILE, [PLACE, ROW])
            assert sent[0].prompt_token_ids == sent[1].prompt_token_ids
            assert sent[2].prompt_token_ids == sent[3].prompt_token_ids

    run(work())


def test_a_resumable_request_with_an_image_is_repeated() -> None:
    async def work() -> None:
        async with served(images=LIMITS) as (scene, client):
            prompt: Prompt = [{"role": "user", "content": [IMAGE]}]
            outputs = []
            for _ in range(2):
                deltas = client.stream(prompt, PARAMS, request_id="r", resumable=True)
                outputs.append([t async for delta in deltas for t in delta.token_ids])
            first, again = outputs
            assert first == again
            assert len([c for c in scene.prefill.commands if isinstance(c, PrefillCommand)]) == 1

    run(work())


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"prompt": "no marker", "images": [FILE]}, "one <image> per image, got 0 for 1 images"),
        ({"prompt": MARKER * 2, "images": [FILE]}, "one <image> per image, got 2 for 1 images"),
        ({"prompt": MARKER * 3, "images": [FILE] * 3}, "may have 2 images, got 3"),
        ({"prompt": MARKER, "images": [b"x"]}, "images[0]: the image must be a whole PNG"),
        ({"prompt": MARKER, "images": ["http://a/"]}, "images must be bytes of a file, or a data"),
        ([{"role": "system", "content": [IMAGE]}], "chat.messages[0].parts: are for messages of"),
        ([{"role": "user", "content": [{"type": "video"}]}], "parts must be a text, image or"),
        ([{"role": "user", "content": [{"type": "text", "text": MARKER}, IMAGE]}], "must not have"),
    ],
)
def test_a_wrong_image_is_one_line(prompt: Prompt, error: str) -> None:
    async def work() -> None:
        async with served(images=LIMITS) as (_, client):
            with pytest.raises(InvalidRequestError) as found:
                await client.generate(prompt, PARAMS)
            assert error in str(found.value)

    run(work())


def test_a_model_that_reads_text_refuses_images() -> None:
    async def work() -> None:
        async with served() as (_, client):
            (model,) = await client.models()
            assert model.image_marker == ""
            with pytest.raises(InvalidRequestError, match="this model reads text only"):
                await client.generate([{"role": "user", "content": [IMAGE]}], PARAMS)

    run(work())
