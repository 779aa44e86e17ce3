"""Fields of beam searches over HTTP: what is refused in one line, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.beam_search import BeamSearchParams, search_beams
from baton.link.words import PrefillCommand
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, on_http
from tests.fakes.router.one_token_model import OneTokenModel, best

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BEAMS = {"use_beam_search": True, "n": 2}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "stream: cannot be true with use_beam_search"),
        ({"temperature": 0.5}, "temperature: must be 0 or absent in a beam search, got 0.5"),
        ({"top_p": 0.5}, "top_p: cannot be used in a beam search"),
        ({"stop": ["a"]}, "stop: cannot be used in a beam search"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs: cannot be used in a beam"),
        ({"max_tokens": 1025}, "max_tokens: must be at most 1024 in a beam search, got 1025"),
        ({"n": 3, "best_of": 2}, "n: must be at most the 2 beams, got 3"),
        ({"best_of": 21}, "best_of: must be a whole number from 1 to 20, got 21"),
        ({"n": 0}, "n: must be"),
        ({"stop_token_ids": list(range(1, 26))}, "stop_token_ids: must leave fewer than 20 end"),
        ({"length_penalty": 11}, "length_penalty: must be a number from -10 to 10, got 11"),
        ({"early_stopping": "now"}, "early_stopping: "),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty: needs use_beam_search"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping: needs use_beam"),
    ],
)
def test_what_does_not_fit_a_beam_search_is_refused_at_the_edge(
    path: str, fields: dict[str, Any], message: str
) -> None:
    @on_http(max_model_len=2000)
    async def run(scene: HttpScene) -> None:
        prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {}
        response = await scene.post(path, **{**prompt, **BEAMS, **fields})
        assert response.status == 400
        assert (await response.json())["error"]["message"].startswith(message)
        assert scene.prefill.of(PrefillCommand) == []

    run()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@on_http(max_model_len=2000)
async def test_the_best_outputs_come_best_first_with_their_logprobs(
    scene: HttpScene, path: str
) -> None:
    model = OneTokenModel()
    scene.dispatcher.run = model.run  # type: ignore[method-assign]
    is_chat = path == CHAT
    asked: dict[str, Any] = {"prompt": [5, 6, 7], "logprobs": 0}
    if is_chat:
        asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    beams = {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.5}
    response = await scene.post(path, max_tokens=4, priority=3, **beams, **asked)
    answer = await response.json()
    assert response.status == 200, answer
    prompt = model.calls[0].prompt_token_ids
    params = BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.5)
    [expected] = search_beams(
        [prompt], params, 2000, lambda prefixes, num: [best(one, num) for _, one in prefixes]
    )
    for choice, beam in zip(answer["choices"], expected, strict=False):
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert text == TOKENIZER.decode(beam.token_ids)
        given = choice["logprobs"]
        found = [one["logprob"] for one in given["content"]] if is_chat else given["token_logprobs"]
        assert found == pytest.approx(beam.logprobs)
        assert choice["finish_reason"] == "length"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 8
    assert {call.terms.priority for call in model.calls} == {3}
