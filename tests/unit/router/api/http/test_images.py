"""Unit tests of images in chats over HTTP: the three APIs, tokens, commands, and refusals."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from baton.access.identity import ANYBODY, Principal
from baton.api.outputs import FinishReason
from baton.link.words import DecodeCommand, PrefillCommand
from baton.media.expand import image_digest
from router.intake.images.image_options import ImageOptions
from router.intake.images.image_reader import ImageFile
from router.intake.prompt_reader import IllustratedPrompt
from tests.fakes.checkpoints.image_tokenizer import MARKER, image_tokenizer, rows_layout
from tests.fakes.outside.hostile_images import picture
from tests.fakes.router.http_scene import HttpScene, events_of, on_http, until
from tests.fakes.router.one_token_model import OneTokenModel

pytestmark = pytest.mark.medium

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LIMITS = ImageOptions(max_images=2, max_image_bytes=4_000)
FIRST, SECOND = picture("PNG", (28, 14)), picture("JPEG", (14, 28))
LAYOUT = rows_layout()
PLACE, ROW = LAYOUT.marker_token_id, LAYOUT.row_token_id


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "low"}}


def user(*content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


SEE, OR = ({"type": "text", "text": text} for text in ("see", "or"))
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 4}
TWO = user(SEE, part(FIRST), OR, part(SECOND))
FIRST_TOKENS, SECOND_TOKENS = [PLACE, PLACE, ROW], [PLACE, ROW, PLACE, ROW]


async def error_of(scene: HttpScene, path: str, **body: Any) -> str:
    response = await scene.post(path, **body)
    error = (await response.json())["error"]
    assert response.status == 400, error
    message: str = error["message"]
    assert "\n" not in message
    return message


@on_http(images=LIMITS, encodes_images=True)
async def test_a_chat_with_images_reaches_the_nodes_and_its_receipt_counts_them(
    scene: HttpScene,
) -> None:
    reply = scene.post(CHAT, messages=TWO, include_receipt=True, max_tokens=5)
    command = await scene.command()
    tokens = command.prompt_token_ids
    assert [image.data for image in command.images] == [FIRST, SECOND]
    first, second = (image.span for image in command.images)
    assert tokens[first.first : first.end] == FIRST_TOKENS
    assert tokens[second.first : second.end] == SECOND_TOKENS
    assert (first.grid, second.grid) == ((1, 1, 2), (1, 2, 1))
    assert first.digest == image_digest(FIRST, LAYOUT.settings)
    text = image_tokenizer().decode([t for t in tokens if t not in (PLACE, ROW)])
    assert "seeor" in text
    (other,) = scene.decode.of(DecodeCommand)
    assert [image.span for image in other.images] == [first, second]
    assert not any(image.data for image in other.images)
    scene.say(command, 0, "a b", last=FinishReason.STOP)
    answer = await (await reply).json()
    (receipt,) = answer["baton"]["receipts"]
    assert (receipt["num_images"], receipt["num_image_tokens"]) == (2, 7)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert "baton_router_image_tokens_total 7.0" in scene.metrics.text().decode()


@on_http(images=LIMITS, encodes_images=True)
async def test_a_stream_with_an_image_is_like_any_other(scene: HttpScene) -> None:
    reply = scene.post(CHAT, messages=user(part(FIRST)), stream=True)
    scene.say(await scene.command(), 0, "a b", last=FinishReason.STOP)
    *chunks, done = events_of(await (await reply).text())
    assert done == "[DONE]"
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "a b"


@on_http(images=LIMITS, encodes_images=True)
async def test_text_around_an_image_is_tokenized_with_its_neighbours(scene: HttpScene) -> None:
    reader = scene.intake.reader
    assert reader.images is not None
    reader.images.layout = replace(LAYOUT, around="\n\n")
    line, more = ({"type": "text", "text": text} for text in ("see\n", "\nmore"))
    scene.post(CHAT, messages=user(line, part(FIRST), more))
    command = await scene.command()
    tokenizer, messages = image_tokenizer(), user(line, {"type": "image"}, more)
    rendered = tokenizer.render_chat(messages).replace(MARKER, f"\n\n{MARKER}\n\n")
    wanted = tokenizer.encode(rendered, add_special_tokens=False)
    place = wanted.index(PLACE)
    wanted[place : place + 1] = FIRST_TOKENS
    assert command.prompt_token_ids == wanted
    text = IllustratedPrompt(f"see\n{MARKER}\nmore", [ImageFile(FIRST, "images[0]")])
    found = await reader.tokenize(text, add_special_tokens=False)
    begin = wanted.index(found[0])
    assert found == wanted[begin : begin + len(found)]


def test_all_apis_send_the_same_prompt() -> None:
    @on_http(images=LIMITS, encodes_images=True)
    async def run(scene: HttpScene) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": data_url(FIRST)[22:]}
        of_messages = user(SEE, {"type": "image", "source": source})
        of_responses = user(
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"},
        )
        scene.post(CHAT, messages=user(SEE, part(FIRST)))
        scene.post(MESSAGES, messages=of_messages, max_tokens=5)
        scene.post(RESPONSES, input=of_responses)
        await scene.command(3)
        commands = scene.prefill.of(PrefillCommand)
        assert len({tuple(one.prompt_token_ids) for one in commands}) == 1
        assert all(one.images == commands[0].images != () for one in commands)
        counted = await scene.post(f"{MESSAGES}/count_tokens", messages=of_messages)
        tokenized = await scene.post("/tokenize", messages=user(SEE, part(FIRST)))
        num_tokens = len(commands[0].prompt_token_ids)
        assert (await counted.json())["input_tokens"] == num_tokens
        assert (await tokenized.json())["tokens"] == commands[0].prompt_token_ids

    run()


@on_http(images=LIMITS, encodes_images=True)
async def test_models_say_that_they_take_images(scene: HttpScene) -> None:
    async with scene.session.get(f"{scene.url}/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["input_modalities"] == ["text", "image"]


@on_http(images=LIMITS, encodes_images=True)
async def test_text_that_a_template_of_parts_would_lose_is_shown(scene: HttpScene) -> None:
    answer = await scene.post("/tokenize", messages=[{"role": "user", "content": "hello"}])
    assert "hello" in image_tokenizer().decode((await answer.json())["tokens"])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (user(*[part(FIRST)] * 3), "messages: a request may have 2 images, got 3"),
        (user(part(bytes(4_001))), "content[0]: images of a request must have at most 4000 bytes"),
        (user(part(FIRST), part(bytes(3_000))), "4000 bytes together, got 3000 after"),
        (user({"type": "image_url"}), "messages[0].content[0].image_url: is needed"),
        (user({"type": "image_url", "image_url": ""}), "content[0].image_url: is needed"),
        (user({"type": "image_url", "image_url": "data:,x"}), "must be a URL of the form data:"),
        (
            user({"type": "image_url", "image_url": data_url(b"x", "text/html")}),
            "of the form data:",
        ),
        (
            user({"type": "image_url", "image_url": "data:image/png;base64,%%%"}),
            "messages[0].content[0]: has no valid base64 behind the comma",
        ),
        (
            user({"type": "image_url", "image_url": "https://example.org/a.png"}),
            "content[0]: must be a data URL: this server fetches no images (--image-hosts)",
        ),
        (user({"type": "text", "text": f"a {MARKER}"}, part(FIRST)), f"must not have {MARKER}"),
        ([{"role": "system", "content": [part(FIRST)]}, *user()], "the role system"),
        ([{"role": "assistant", "content": [part(FIRST)]}], "of the role assistant"),
        (user({"type": "input_audio", "input_audio": {}}), "or image_url, got 'input_audio'"),
        (user({"type": "video_url", "video_url": {}}), "or image_url, got 'video_url'"),
        (user(part(FIRST), {"type": "file", "file": {}}), "content[1]: must be of type text"),
    ],
)
def test_a_wrong_image_is_one_line_that_names_field_and_limit(
    messages: list[dict[str, Any]], error: str
) -> None:
    @on_http(images=LIMITS, encodes_images=True)
    async def run(scene: HttpScene) -> None:
        assert error in await error_of(scene, CHAT, messages=messages)

    run()


@on_http(images=LIMITS, encodes_images=True)
async def test_other_apis_name_their_own_fields(scene: HttpScene) -> None:
    block = {"type": "image", "source": {"type": "file", "file_id": "x"}}
    error = await error_of(scene, MESSAGES, messages=user(block), max_tokens=5)
    assert error == "messages[0].content[0].source.type: must be base64 or url, got 'file'"
    item = {"type": "input_image", "file_id": "x"}
    error = await error_of(scene, RESPONSES, input=user(item))
    assert error == "input[0].content[0].file_id: is not supported, as nothing is stored"
    wrong = {"type": "input_image", "image_url": data_url(b"x")}
    error = await error_of(scene, RESPONSES, input=user(wrong))
    assert error == "input: the image must be a whole PNG, JPEG, WEBP or GIF file"


@on_http()
async def test_a_model_that_reads_text_refuses_images_in_one_line(scene: HttpScene) -> None:
    error = await error_of(scene, CHAT, messages=user(part(FIRST)))
    assert error == "messages[0].content[0]: has an image, but this model reads text only"


@on_http(images=LIMITS, encodes_images=False)
async def test_nodes_that_compute_text_only_get_no_images(scene: HttpScene) -> None:
    error = await error_of(scene, CHAT, messages=user(part(FIRST)))
    assert error.endswith("has an image, but the nodes of this model compute text only")


@on_http(images=LIMITS, encodes_images=True)
async def test_outputs_share_a_bound_of_image_bytes(scene: HttpScene) -> None:
    num_bytes = len(FIRST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.intake.choices.MAX_IMAGE_BYTES", 2 * num_bytes)
        error = await error_of(scene, CHAT, messages=user(part(FIRST)), n=3)
        assert error == f"n: must be at most 2 with images of {num_bytes} bytes, got 3"
        scene.post(CHAT, messages=user(part(FIRST)), n=2)
        await scene.command(2)


@on_http(images=LIMITS, encodes_images=True)
async def test_each_call_of_a_beam_search_has_the_images(scene: HttpScene) -> None:
    model = OneTokenModel()
    scene.dispatcher.run = model.run  # type: ignore[method-assign]
    response = await scene.post(CHAT, messages=user(part(FIRST)), **BEAMS)
    assert response.status == 200, await response.text()
    assert len(model.calls) == 1 + 3 * 2
    assert {call.images[0].data for call in model.calls} == {FIRST}


@on_http(images=LIMITS, encodes_images=True)
async def test_beam_searches_have_a_bound_of_image_bytes(scene: HttpScene) -> None:
    num_bytes = len(FIRST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.calls.beam_run.MAX_SEARCH_IMAGE_BYTES", 7 * num_bytes)
        error = await error_of(scene, CHAT, messages=user(part(FIRST)), **BEAMS)
        wanted = f"must be at most 3 with 2 beams and images of {num_bytes} bytes, got 4"
        assert error == f"max_tokens: {wanted}"
        patch.setattr("router.calls.beam_run.MAX_STEP_IMAGE_BYTES", num_bytes)
        error = await error_of(scene, CHAT, messages=user(part(FIRST)), **BEAMS)
        assert error == f"n: must be at most 1 with images of {num_bytes} bytes, got 2"


@on_http(images=LIMITS, encodes_images=True)
async def test_a_beam_search_without_max_tokens_has_as_many_as_images_allow(
    scene: HttpScene,
) -> None:
    scene.dispatcher.run = OneTokenModel().run  # type: ignore[method-assign]
    beams = {name: value for name, value in BEAMS.items() if name != "max_tokens"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.calls.beam_run.MAX_SEARCH_IMAGE_BYTES", 7 * len(FIRST))
        response = await scene.post(CHAT, messages=user(part(FIRST)), **beams)
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == 2 * 3  # two beams


@on_http(images=LIMITS, encodes_images=True)
async def test_tenants_and_words_share_no_encodings(scene: HttpScene) -> None:
    reader = scene.intake.reader
    prompt = IllustratedPrompt(MARKER, [ImageFile(FIRST, "images[0]")])
    one, other = (Principal(name="key", tenant=name) for name in "ab")
    found: dict[tuple[str, str], set[bytes]] = {}
    for who, word in ((ANYBODY, ""), (one, ""), (one, "word"), (other, "")):
        for _ in range(2):
            read = await reader.read(prompt, who, word)
            found.setdefault((who.tenant, word), set()).add(read.images[0].span.digest)
    assert [len(digests) for digests in found.values()] == [1] * 4
    assert len(set.union(*found.values())) == 4
    assert found["", ""] == {image_digest(FIRST, LAYOUT.settings)}


@on_http(images=LIMITS, encodes_images=True)
async def test_a_chat_s_word_salts_its_images(scene: HttpScene) -> None:
    scene.post(CHAT, messages=user(part(FIRST)), cache_salt="word", max_tokens=5)
    command = await scene.command()
    assert command.images[0].span.digest != image_digest(FIRST, LAYOUT.settings)


@on_http(images=ImageOptions(max_open_image_bytes=2 * len(FIRST) - 1), encodes_images=True)
async def test_files_of_open_requests_are_bounded_until_these_end(scene: HttpScene) -> None:
    reply = scene.post(CHAT, messages=user(part(FIRST)))
    command = await scene.command()
    refused = await scene.post(CHAT, messages=user(part(FIRST)))
    assert refused.status == 429
    assert "max_open_image_bytes" in (await refused.json())["error"]["message"]
    scene.say(command, 0, "a", last=FinishReason.STOP)
    assert (await reply).status == 200
    del command
    scene.prefill.commands.clear()
    scene.decode.commands.clear()
    scene.dispatcher.calls.clear()
    reader = scene.intake.reader.images
    assert reader is not None
    await until(lambda: not reader.open.num_bytes)
