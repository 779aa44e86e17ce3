"""Unit tests of the smaller paths: texts as token ids, versions, what is not served."""

from __future__ import annotations

from typing import Any

import pytest
from yarl import URL

from baton.api.outputs import FinishReason
from baton.link.words import PrefillCommand
from baton.version import __version__
from router.api.http_server import NOT_SERVED
from router.intake import prompt_reader, texts
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, on_http

pytestmark = pytest.mark.medium

MESSAGES = [{"role": "user", "content": "x"}]
SPECIAL = TOKENIZER.token_bytes(min(TOKENIZER.special_token_ids)).decode()


async def answer(scene: HttpScene, path: str, **body: Any) -> Any:
    async with scene.session.post(scene.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@on_http()
async def test_a_text_is_tokenized_and_put_together_again(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the paths of vLLM's shape that were missing."""
    monkeypatch.setattr(prompt_reader, "_DECODED_AT_ONCE", 7)
    text = "def größer(): # 👩‍🚀"
    told = await answer(scene, "/tokenize", prompt=text, return_token_strs=True)
    token_ids = TOKENIZER.encode(text)
    assert told["tokens"] == token_ids
    assert (told["count"], told["max_model_len"]) == (len(token_ids), scene.pool.max_model_len)
    assert len(told["token_strs"]) == len(token_ids)
    assert told["token_strs"][0] == "def"
    assert (await answer(scene, "/tokenize", prompt="x", model="demo"))["token_strs"] is None
    assert await answer(scene, "/detokenize", tokens=token_ids) == {"prompt": text}
    long = token_ids * 3
    assert (await answer(scene, "/detokenize", tokens=long))["prompt"] == text * 3


@on_http()
async def test_a_conversation_is_tokenized_as_a_chat_would_be(scene: HttpScene) -> None:
    told = await answer(scene, "/tokenize", messages=MESSAGES)
    reply = scene.post("/v1/chat/completions", messages=MESSAGES)
    command = await scene.command()
    assert told["tokens"] == list(command.prompt_token_ids)
    scene.say(command, 0, "x", last=FinishReason.STOP)
    await reply
    shorter = await answer(scene, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
    assert told["tokens"][: shorter["count"]] == shorter["tokens"] != told["tokens"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_message_that_is_to_be_continued_ends_the_prompt(path: str) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        messages = [*MESSAGES, {"role": "assistant", "content": "def f( "}]
        fields: dict[str, Any] = {"messages": messages, "continue_final_message": True}
        if path == "/tokenize":
            token_ids = (await answer(scene, path, **fields))["tokens"]
        else:
            reply = scene.post(path, **fields)
            command = await scene.command()
            token_ids = list(command.prompt_token_ids)
            scene.say(command, 0, "x", last=FinishReason.STOP)
            assert (await reply).status == 200
        text = TOKENIZER.decode(token_ids, skip_special_tokens=False)
        assert text.endswith("assistant\ndef f( ")
        whole = (await answer(scene, "/tokenize", messages=messages))["tokens"]
        assert len(whole) > len(token_ids)

    run()


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "prompt: or messages is needed, and not both"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt: or messages is needed"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model: 'other' does not exist here"),
        ("/tokenize", {"prompt": "x " * 500_000}, "prompt is too long: "),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: cannot be together with add_generation_prompt",
        ),
        ("/detokenize", {"tokens": [4096]}, "tokens: token ids must be 0 to 4095"),
        ("/detokenize", {"tokens": [-1]}, "tokens: token ids must be 0 to 4095"),
        ("/detokenize", {"tokens": [1] * 101}, "tokens: must have at most 100, got 101"),
        ("/detokenize", {"tokens": "x"}, "tokens: must be a list, got a string"),
    ],
)
def test_what_cannot_be_tokenized_is_the_clients_error(
    path: str, fields: dict[str, Any], message: str
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        async with scene.session.post(scene.url + path, json=fields) as response:
            assert response.status in (400, 404)
            assert (await response.json())["error"]["message"].startswith(message)
        assert scene.prefill.of(PrefillCommand) == []

    run()


@pytest.mark.parametrize(
    "path",
    ["/v1//models", "//v1/models", "/v1/models/", "///v1/models//?a=//b", "/v1/models//demo/"],
)
def test_more_slashes_than_needed_change_no_path(path: str) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        async with scene.session.get(URL(scene.url + path, encoded=True)) as response:
            assert response.status == 200, await response.text()
        url = URL(f"{scene.url}//v1//messages/count_tokens/", encoded=True)
        asked = {"model": "demo", "messages": MESSAGES}
        async with scene.session.post(url, json=asked) as response:
            assert response.status == 200, await response.text()
        # Errors there are in the form of that API.
        async with scene.session.post(url, json={}) as response:
            assert (await response.json())["type"] == "error"

    run()


@on_http()
async def test_special_tokens_of_a_text_may_be_left_out(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(The demo model adds none: the field is taken all the same, on short and long texts.)"""
    monkeypatch.setattr(texts, "SHORT_TEXT_CHARS", 10)
    for text in ("x", "def f(x):\n    return x\n"):
        told = await answer(scene, "/tokenize", prompt=text, add_special_tokens=False)
        assert told["tokens"] == TOKENIZER.encode(text, add_special_tokens=False)


@on_http()
async def test_version_ping_and_load(scene: HttpScene) -> None:
    session, url = scene.session, scene.url
    async with session.get(url + "/version") as response:
        assert await response.json() == {"version": __version__}
    for method in ("GET", "POST"):
        async with session.request(method, url + "/ping") as response:
            assert response.status == 200
    reply = scene.post()
    command = await scene.command()
    async with session.get(url + "/load") as response:
        assert await response.json() == {"server_load": 1}
    scene.say(command, 0, "x", last=FinishReason.STOP)
    await reply
    async with session.get(url + "/load") as response:
        assert await response.json() == {"server_load": 0}


@pytest.mark.parametrize("path", NOT_SERVED)
def test_what_other_models_do_is_not_implemented_and_says_so(path: str) -> None:
    """Regression: the answer was 404, as if the path was wrong."""

    @on_http()
    async def run(scene: HttpScene) -> None:
        async with scene.session.post(scene.url + path, json={"input": "x"}) as response:
            assert response.status == 501
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("not_implemented_error", "not_supported")
            assert error["message"].endswith("is for models of another kind: 'demo' writes text")

    run()
