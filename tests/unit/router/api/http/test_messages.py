"""Unit tests of messages over HTTP: reasoning, and calls of tools as they come."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.api.outputs import FinishReason
from router.intake.parsers.choice import OutputParsers
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, events_of, on_http

pytestmark = pytest.mark.medium

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
THINKS = "<think>\nHm.\n</think>\n\nYes."
CALLS = 'I look. <tool_call>\n{"name": "f", "arguments": {"x": "größer"}}\n</tool_call>'


def deltas_of(text: str) -> list[dict[str, Any]]:
    return [
        event["choices"][0]["delta"]
        for event in events_of(text)
        if event != "[DONE]" and event["choices"]
    ]


@pytest.mark.parametrize("stream", [False, True])
@on_http(parsers=OutputParsers(TOKENIZER, reasoning_parser="qwen3"))
async def test_reasoning_has_fields_of_its_own(scene: HttpScene, stream: bool) -> None:
    answer = scene.post(CHAT, messages=MESSAGES, stream=stream)
    scene.say(await scene.command(), 0, THINKS, last=FinishReason.STOP)
    response = await answer
    if stream:
        deltas = deltas_of(await response.text())
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert "".join(delta.get("reasoning", "") for delta in deltas) == reasoning
        content = "".join(delta.get("content", "") for delta in deltas)
    else:
        message = (await response.json())["choices"][0]["message"]
        reasoning, content = message["reasoning_content"], message["content"]
        assert message["reasoning"] == reasoning
    assert (reasoning, content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("stream", [False, True])
@on_http(max_model_len=1000)
async def test_tools_are_called_though_the_template_takes_none(
    scene: HttpScene, stream: bool
) -> None:
    answer = scene.post(CHAT, messages=MESSAGES, tools=TOOLS, stream=stream)
    command = await scene.command()
    prompt = TOKENIZER.decode(command.prompt_token_ids)
    assert '{"type": "function", "function": {"name": "f"' in prompt
    scene.say(command, 0, CALLS, last=FinishReason.STOP)
    response = await answer
    if stream:
        text = await response.text()
        calls = [call for delta in deltas_of(text) for call in delta.get("tool_calls", ())]
        first, *rest = calls
        assert first["function"]["name"] == "f"
        assert first["type"] == "function"
        assert all(set(call) == {"index", "function"} for call in rest)
        arguments = "".join(call["function"]["arguments"] for call in calls)
        finish_reason = events_of(text)[-2]["choices"][0]["finish_reason"]
    else:
        choice = (await response.json())["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "I look. "
        assert set(call) == {"id", "function", "type"}
        arguments, finish_reason = call["function"]["arguments"], choice["finish_reason"]
    assert arguments == '{"x": "größer"}'
    assert finish_reason == "tool_calls"


@on_http(parsers=OutputParsers(TOKENIZER, reasoning_parser="deepseek_r1"))
async def test_a_thought_precedes_what_a_grammar_holds(scene: HttpScene) -> None:
    answer = scene.post(CHAT, messages=MESSAGES, structured_outputs={"regex": "a"})
    scene.say(await scene.command(), 0, "Hm.</think>a", last=FinishReason.STOP)
    message = (await (await answer).json())["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "a")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "stop"),
        ("/v1/responses", "stop"),
        ("/v1/messages", "stop_sequences"),
    ],
)
def test_a_stop_string_in_the_reasoning_ends_no_answer(path: str, field: str, stream: bool) -> None:
    """Regression: an answer was empty if the reasoning had a blank line."""

    @on_http(parsers=OutputParsers(TOKENIZER, reasoning_parser="qwen3"))
    async def run(scene: HttpScene) -> None:
        messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 90}
        body: dict[str, Any] = {"input": "x"} if path == "/v1/responses" else messages
        reply = scene.post(path, **body, **{field: ["\n\n"]}, stream=stream)
        command = await scene.command()
        text = "<think>One.\n\nTwo.</think>Yes.\n\nNo."
        scene.say(command, 0, text, last=FinishReason.LENGTH)
        said = await (await reply).text()
        assert "Two" in said
        assert "Yes" in said
        assert "No." not in said
        if path == "/v1/messages":
            assert '"stop_sequence"' in said

    run()


@pytest.mark.parametrize("size", ["tokens", "characters"])
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"],
)
def test_a_prompt_that_is_too_long_is_told_in_words_that_agents_know(path: str, size: str) -> None:
    """Agents sent more, again and again: they did not know that it was too long."""

    @on_http(max_model_len=100)
    async def run(scene: HttpScene) -> None:
        text = "a " * (400 if size == "tokens" else 500_000)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
        if path == "/v1/responses":
            body = {"input": text}
        elif path == "/v1/completions":
            body = {"prompt": text}
        response = await scene.post(path, **body)
        assert response.status == 400
        error = (await response.json())["error"]
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 99 maximum", error["message"])
        assert error["type"] == "invalid_request_error"
        if path != "/v1/messages":  # Anthropic's errors have no code
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == {"/v1/responses": "input"}.get(path, error["param"])

    run()
