"""Unit tests of requests over HTTP that cost much: what is made once, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.errors import OverloadedError
from baton.link import PrefillCommand
from baton.outputs import FinishReason
from router.http import completions, exchange
from router.intake import Intake
from tests.fakes.http_scene import TOKENIZER, HttpScene, on_http


@on_http()
async def test_a_prompt_of_token_ids_is_decoded_once_for_all_outputs_and_only_to_be_echoed(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Sequence[int]] = []
    decode = Intake.decode

    async def noting(self: Intake, token_ids: Sequence[int], **options: bool) -> str:
        decoded.append(token_ids)
        return await decode(self, token_ids, **options)

    monkeypatch.setattr(Intake, "decode", noting)
    for echo, num_decoded in ((False, 0), (True, 1)):
        begun = len(scene.prefill.of(PrefillCommand))
        reply = scene.post(n=4, prompt=[70, 71, 72], echo=echo)
        for number in range(4):
            scene.say(await scene.command(begun + number + 1), 0, "x", last=FinishReason.STOP)
        texts = [choice["text"] for choice in (await (await reply).json())["choices"]]
        assert texts == [(TOKENIZER.decode([70, 71, 72]) if echo else "") + "x"] * 4
        assert len(decoded) == num_decoded


@on_http()
async def test_a_prompt_is_not_echoed_a_hundredfold(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_ECHOED_CHARS", 100)
    response = await scene.post(n=10, prompt="eleven char", echo=True, max_tokens=1)
    assert response.status == 400
    assert (await response.json())["error"]["message"] == (
        "echo: prompts of all outputs must have at most 100 characters"
    )
    assert scene.prefill.of(PrefillCommand) == []


@on_http()
async def test_a_response_without_stream_has_only_so_many_logprobs(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_LOGPROBS_AT_ONCE", 10)
    top = ((1, -1.0), (2, -2.0))
    text = "1 2 3 4 5 6 7 8 9"  # of four tokens or more, each with two others
    for stream, status in ((False, 400), (True, 200)):
        begun = len(scene.prefill.of(PrefillCommand))
        reply = scene.post(logprobs=2, stream=stream)
        command = await scene.command(begun + 1)
        scene.say(command, 0, text, last=FinishReason.STOP, top=top)
        response = await reply
        assert response.status == status
        if not stream:
            error = (await response.json())["error"]
            assert error["message"] == "logprobs: a response without stream may have 10 together"


@on_http()
async def test_a_chat_over_a_limit_is_refused_before_it_is_tokenized(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(principal: object) -> None:
        raise OverloadedError("it has used its requests")

    monkeypatch.setattr(scene.dispatcher.admission, "check_key", refuse)
    # Its template takes no tools, which is found out when it is to be tokenized.
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]
    response = await scene.post("/v1/chat/completions", messages=messages, tools=tools)
    assert response.status == 429
