"""Unit tests of what a stream tells as it goes: a chunk per step, and what it has cost so far."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.outputs import FinishReason, RequestDelta, TokenLogprobs
from baton.link.words import PrefillCommand
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, events_of, on_http
from tests.fakes.router.nodes import DECODE_RECEIPT, PREFILL_RECEIPT

pytestmark = pytest.mark.medium

CHAT = "/v1/chat/completions"
EURO = TOKENIZER.encode("€")


def fields_of(path: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {}


async def stream_of_euros(scene: HttpScene, path: str, **fields: Any) -> list[Any]:
    """Events of an output of two euro signs, told token by token, each when the last was read."""
    reply = scene.post(path, stream=True, **fields_of(path), **fields)
    command = await scene.command()
    token_ids = [*EURO, *EURO]
    text = b""
    for index, token_id in enumerate(token_ids):
        last = FinishReason.LENGTH if index == len(token_ids) - 1 else None
        prefill = PREFILL_RECEIPT if index == 0 else None
        decode = DECODE_RECEIPT if last else None
        node = scene.decode if index else scene.prefill
        node.say(
            RequestDelta(
                command.request_id,
                index,
                (token_id,),
                last,
                epoch=command.epoch,
                prefill=prefill,
                decode=decode,
            )
        )
        text += await (await reply).content.readuntil(b"\n\n")
    text += await (await reply).read()
    return events_of(text.decode())


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_token_that_ends_no_character_makes_a_chunk_with_an_empty_text(path: str) -> None:
    """Regression: the token made no chunk, so times between chunks overstated times per token."""
    assert len(EURO) > 1

    @on_http()
    async def run(scene: HttpScene) -> None:
        *chunks, done = await stream_of_euros(scene, path)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        texts = [c["delta"]["content"] if path == CHAT else c["text"] for c in choices]
        empty = [""] * (len(EURO) - 1)
        assert texts == [*empty, "€", *empty, "€"]

    run()


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("include_usage", [True, False])
def test_each_chunk_tells_what_its_output_has_cost_if_it_is_asked_for(
    path: str, include_usage: bool
) -> None:
    """guidellm sends the field with every request; it was once refused as unknown."""

    @on_http()
    async def run(scene: HttpScene) -> None:
        options = {"include_usage": include_usage, "continuous_usage_stats": True}
        *chunks, _ = await stream_of_euros(scene, path, stream_options=options)
        num_prompt_tokens = len((await scene.command()).prompt_token_ids)
        whole = chunks.pop() if include_usage else chunks[-1]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == list(range(1, 2 * len(EURO) + 1))
        for chunk in (*chunks, whole):
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == num_prompt_tokens
            assert usage["total_tokens"] == num_prompt_tokens + usage["completion_tokens"]
        assert (whole["choices"] == []) == include_usage
        assert whole["usage"]["completion_tokens"] == 2 * len(EURO)
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0

    run()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_prompt_is_scored_without_an_output(stream: bool, last: FinishReason) -> None:
    """`max_tokens: 0` with `echo` was refused; evaluations ask for log-likelihoods so."""

    @on_http()
    async def run(scene: HttpScene) -> None:
        prompt = "def f(€):"
        token_ids = TOKENIZER.encode(prompt)
        reply = scene.post(
            prompt=prompt, echo=True, max_tokens=0, logprobs=1, stream=stream, temperature=0
        )
        command: PrefillCommand = await scene.command()
        assert command.sampling_params.max_tokens == 1
        logprobs = (None, *(TokenLogprobs(-float(i), ((5, -0.1),)) for i in token_ids[1:]))
        drawn = (TokenLogprobs(-0.5, ((5, -0.1),)),)
        scene.prefill.say(
            RequestDelta(
                command.request_id,
                0,
                (260,),
                last,
                drawn,
                logprobs,
                epoch=command.epoch,
                prefill=PREFILL_RECEIPT,
            )
        )
        response = await reply
        body = events_of(await response.text())[0] if stream else await response.json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        found = choice["logprobs"]
        assert found["token_logprobs"] == [None, *(-float(i) for i in token_ids[1:])]
        assert len(found["tokens"]) == len(found["text_offset"]) == len(token_ids)
        assert found["text_offset"][-1] == len(prompt) - len(found["tokens"][-1])
        if not stream:
            assert body["usage"]["completion_tokens"] == 0
            assert body["usage"]["prompt_tokens"] == len(token_ids)

    run()
