"""Unit tests of costly requests over HTTP: work that is shared, and requests that are refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from baton.api.errors import OverloadedError
from baton.api.outputs import FinishReason, RequestDelta, TokenLogprobs
from baton.link.words import PrefillCommand
from router.api.http import completions, exchange
from router.api.http.logprobs import TokenTexts
from router.intake.answers import long_answers
from router.intake.prompt_reader import PromptReader
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, events_of, on_http
from tests.fakes.router.nodes import DECODE_RECEIPT, PREFILL_RECEIPT

pytestmark = pytest.mark.medium


@on_http()
async def test_a_prompt_of_token_ids_is_decoded_once_for_all_outputs_and_only_to_be_echoed(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Sequence[int]] = []
    decode = PromptReader.decode

    async def noting(self: PromptReader, token_ids: Sequence[int], **options: bool) -> str:
        decoded.append(token_ids)
        return await decode(self, token_ids, **options)

    monkeypatch.setattr(PromptReader, "decode", noting)
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
            assert error["message"] == "logprobs: a response without stream may have 10 in all"


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


@on_http()
@pytest.mark.parametrize("stream", [False, True])
async def test_texts_of_many_logprobs_are_made_in_a_thread(
    scene: HttpScene, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the logprobs of 2,000 tokens blocked the event loop for half a second."""
    threads: list[threading.Thread] = []
    make = TokenTexts.completion

    def noting(self: TokenTexts, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return make(self, *arguments)

    monkeypatch.setattr(TokenTexts, "completion", noting)
    monkeypatch.setattr(long_answers, "MAX_LOGPROBS_HERE", 100)
    prompt = [70] * 90
    reply = scene.post(prompt=prompt, echo=True, logprobs=1, stream=stream)
    _say_one_token(scene, await scene.command(), len(prompt), with_logprobs=True)
    response = await reply
    assert response.status == 200
    if stream:
        body = events_of(await response.text())[0]
    else:
        body = await response.json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 90]
    assert threads
    assert threading.main_thread() not in threads


@on_http()
@pytest.mark.parametrize("echo", [False, True])
async def test_a_node_that_gives_no_logprobs_is_no_error_of_ours(
    scene: HttpScene, echo: bool
) -> None:
    """The answer was once 500, with a traceback in the log."""
    reply = scene.post(prompt=[70, 71], echo=echo, logprobs=1)
    _say_one_token(scene, await scene.command(), 2, with_logprobs=False)
    response = await reply
    assert response.status == 200
    logprobs = (await response.json())["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None] * (3 if echo else 1)


@on_http()
async def test_logprobs_of_some_tokens_are_those_of_none(scene: HttpScene) -> None:
    reply = scene.post(prompt=[70], logprobs=0, max_tokens=2)
    command = await scene.command()
    one = (TokenLogprobs(-0.5),)
    scene.prefill.say(
        RequestDelta(
            command.request_id, 0, (70,), logprobs=one, epoch=command.epoch, prefill=PREFILL_RECEIPT
        )
    )
    scene.decode.say(
        RequestDelta(
            command.request_id,
            1,
            (71,),
            FinishReason.LENGTH,
            epoch=command.epoch,
            decode=DECODE_RECEIPT,
        )
    )
    response = await reply
    assert response.status == 200
    assert (await response.json())["choices"][0]["logprobs"]["token_logprobs"] == [None, None]


def _say_one_token(
    scene: HttpScene, command: PrefillCommand, num_prompt_tokens: int, *, with_logprobs: bool
) -> None:
    one = TokenLogprobs(-0.5, ((70, -0.5),))
    scene.prefill.say(
        RequestDelta(
            command.request_id,
            0,
            (70,),
            FinishReason.STOP,
            (one,) if with_logprobs else (),
            (None, *[one] * (num_prompt_tokens - 1)) if with_logprobs else (),
            epoch=command.epoch,
            prefill=PREFILL_RECEIPT,
        )
    )
