"""Unit tests of Anthropic's Messages API: blocks to messages, outputs to blocks, events, errors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.access.access import Access
from baton.access.api_keys import entry_text
from baton.api.errors import InvalidRequestError, OverloadedError
from baton.api.outputs import FinishReason, Receipt, TextDelta
from baton.link.words import CancelCommand
from router.api.anthropic_messages.api import MessageEvents
from router.api.anthropic_messages.request import CountTokensRequest, MessagesRequest, chat_request
from router.api.http.conversation import asked_thinking, chat_prompt
from router.api.http.ignored_fields import IGNORED_FIELDS_HEADER
from router.api.http.responses import MessageDelta
from router.intake.parsers.choice import AskedThinking, OutputParsers
from tests.fakes.network.event_source import typed_events
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, on_http, until

pytestmark = pytest.mark.medium

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "x"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALLS = (
    "<think>\nhm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
)


def given(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, **fields}
    return msgspec.convert(body, MessagesRequest)


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in chat_prompt(chat_request(given(**fields))).messages]


def post(scene: HttpScene, **fields: Any) -> Any:
    return scene.post(PATH, **{"messages": HELLO, "max_tokens": 50, **fields})


# ---------------------------------------------------------------- what comes in


def test_blocks_are_the_messages_of_a_chat() -> None:
    def use(number: int) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"a": number}}

    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
            use(1), use(2),
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [{"type": "text", "text": "cold"}]},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    system, user, turn, one, two, more = messages_of(
        messages=turns, system=[{"type": "text", "text": "Be brief."}]
    )
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "a\nb\nc"}  # turns of one role are one
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "I look.")
    calls = [(c["id"], c["function"]["name"]) for c in turn["tool_calls"]]
    assert calls == [("t1", "f"), ("t2", "f")]
    assert json.loads(turn["tool_calls"][1]["function"]["arguments"]) == {"a": 2}
    assert one == {"role": "tool", "content": "sunny", "tool_call_id": "t1"}
    assert two == {"role": "tool", "content": "cold", "tool_call_id": "t2"}
    assert more == {"role": "user", "content": "So?"}


def test_fields_arrive_under_the_names_of_chats() -> None:
    schema = {"type": "object"}
    chat = chat_request(
        given(
            system="s", temperature=0.5, top_p=0.9, top_k=3, stream=True, stop_sequences=["a"],
            tools=[TOOL], tool_choice={"type": "tool", "name": "f"},
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        )
    )  # fmt: skip
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.top_k) == (5, 0.5, 0.9, 3)
    assert (chat.stream, chat.stop, chat.reasoning_effort) == (True, ["a"], "low")
    assert chat.tools is not None
    assert msgspec.to_builtins(chat.tools[0].function)["parameters"] == {"type": "object"}
    assert msgspec.to_builtins(chat.tool_choice)["function"] == {"name": "f"}
    assert chat.response_format is not None
    assert chat.response_format.schema == schema
    assert chat_request(given(tools=[TOOL], tool_choice={"type": "any"})).tool_choice == "required"
    off = chat_request(given(thinking={"type": "disabled"}))
    assert (off.reasoning_effort, off.chat_template_kwargs) == ("none", None)
    assert not chat_prompt(off).template_options["enable_thinking"]
    on = chat_request(given(max_tokens=2001, thinking={"type": "enabled", "budget_tokens": 2000}))
    assert chat_prompt(on).template_options == {"enable_thinking": True, "thinking": True}
    assert asked_thinking(on, None) == AskedThinking(must_think=True, budget_tokens=2000)


@pytest.mark.parametrize(
    ("thinking", "problem"),
    [
        ({"type": "enabled", "budget_tokens": 5}, "must be less than max_tokens (5), got 5"),
        ({"type": "enabled", "budget_tokens": 0}, "must be 1 or more, got 0"),
        ({"type": "disabled", "budget_tokens": 3}, "cannot be together with the type 'disabled'"),
    ],
)
def test_a_budget_outside_its_limits_is_refused(thinking: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(given(thinking=thinking))
    assert str(caught.value) == f"thinking.budget_tokens: {problem}"


def test_an_assistants_message_at_the_end_begins_the_answer() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    assert chat_prompt(chat_request(given(messages=begun))).continues_last
    assert not chat_prompt(chat_request(given())).continues_last


def test_reading_many_blocks_takes_time_that_grows_with_their_number() -> None:
    """Read as many blocks as a body may have. Regression: each copied all blocks before it."""
    block: dict[str, Any] = {"type": "text", "text": "x"}
    thought = {"type": "thinking", "thinking": "x" * 100}
    turns = [{"role": "assistant", "content": [block, thought] * 25_000}, *HELLO]
    request = given(messages=turns)
    began = time.process_time()
    chat_request(request)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: must be an integer, got null"),
        ({"max_tokens": 0}, "max_tokens: must be 1 or more, got 0"),
        ({"messages": []}, "messages: must have at least 1 message, got 0"),
        ({"messages": [{"role": "user", "content": []}]}, "messages: must have at least 1 block"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type: is needed",
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": "https://a.example/a.png"}}]}]},
            "messages: has an image, but this model reads text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type: must be text, image or tool_result, got 'document'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type: must be text, thinking or tool_use, got 'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}]}]},
            "messages[0].content[0].content[0]: must be of type text with a text, got 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id: is needed",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages[0].content[0].name: is needed",
        ),
        ({"messages": HELLO * 8193}, "messages: must have at most 8192, got 8193"),
        ({"messages": [{"role": "user", "content": "x " * 500_000}]}, "prompt is too long: "),
        ({"system": [{"type": "image"}]}, "system[0]: must be of type text with a text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}],
          "tool_choice": {"type": "any"}}, "tool_choice: is 'required', but there are no tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: is 'required', but there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is needed"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers: is not supported"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}},
            "output_config.format.schema: Invalid type: thing",
        ),
        ({"temperature": -1}, "temperature: must be 0 or more, got -1"),
        ({"model": "other"}, "model: 'other' does not exist here"),
    ],
)  # fmt: skip
def test_a_wrong_request_names_the_field_that_its_client_wrote(
    fields: dict[str, Any], message: str
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        response = await post(scene, **fields)
        body = await response.json()
        kind = "not_found_error" if "model" in fields else "invalid_request_error"
        assert response.status == (404 if "model" in fields else 400)
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["error"]["message"].startswith(message)
        assert body["request_id"] == response.headers["request-id"]

    run()


# ---------------------------------------------------------------- what goes out


@on_http()
async def test_an_answer_has_a_block_and_says_what_it_cost(scene: HttpScene) -> None:
    """Check the Messages API's path, which was missing."""
    reply = post(scene, metadata={"user_id": "u"}, context_management={"edits": []})
    scene.say(await scene.command(), 0, "one two", last=FinishReason.STOP)
    response = await reply
    assert response.headers[IGNORED_FIELDS_HEADER] == "context_management"
    body = await response.json()
    assert body["id"] == f"msg_{response.headers['request-id']}"
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "demo")
    assert body["content"] == [{"type": "text", "text": "one two"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    (call,) = scene.dispatcher.calls
    usage = body["usage"]
    in_all = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert in_all + usage["cache_creation_input_tokens"] == len(call.prompt_token_ids)
    assert usage["output_tokens"] == len(TOKENIZER.encode("one two"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "last", "reason", "sequence", "text"),
    [
        ({}, FinishReason.STOP, "end_turn", None, "one two three"),
        ({"max_tokens": 50}, FinishReason.LENGTH, "model_context_window_exceeded", None,
         "one two three"),
        ({"max_tokens": 3}, FinishReason.LENGTH, "max_tokens", None, "one two three"),
        ({"stop_sequences": ["zero", " tw"]}, FinishReason.STOP, "stop_sequence", " tw", "one"),
    ],
)  # fmt: skip
def test_an_answer_says_why_it_ended(
    stream: bool,
    fields: dict[str, Any],
    last: FinishReason,
    reason: str,
    sequence: str | None,
    text: str,
) -> None:
    if fields.get("max_tokens") == 3:
        fields = {"max_tokens": len(TOKENIZER.encode("one two three"))}

    @on_http()
    async def run(scene: HttpScene) -> None:
        reply = post(scene, stream=stream, **fields)
        scene.say(await scene.command(), 0, "one two three", last=last)
        response = await reply
        if not stream:
            told = await response.json()
            assert told["content"][0]["text"] == text
        else:
            events = typed_events(await response.text())
            kinds = [event["type"] for event in events]
            deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
            assert kinds == [
                "message_start", "content_block_start", *["content_block_delta"] * len(deltas),
                "content_block_stop", "message_delta", "message_stop",
            ]  # fmt: skip
            assert "".join(deltas) == text
            assert events[0]["message"]["content"] == []
            assert events[0]["message"]["stop_reason"] is None
            assert events[0]["message"]["usage"]["input_tokens"] > 0
            assert events[1]["content_block"] == {"type": "text", "text": ""}
            assert {e["index"] for e in events if "index" in e} == {0}
            assert events[-2]["usage"]["output_tokens"] > 0
            told = events[-2]["delta"]
        assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_thought_said_and_called_are_blocks_of_their_own(stream: bool) -> None:
    @on_http(parsers=OutputParsers(TOKENIZER, "hermes", "qwen3"), max_model_len=20_000)
    async def run(scene: HttpScene) -> None:
        reply = post(scene, stream=stream, tools=[TOOL], max_tokens=500)
        scene.say(await scene.command(), 0, CALLS, last=FinishReason.STOP)
        response = await reply
        if not stream:
            body = await response.json()
            thinking, text, call = body["content"]
            reason, usage = body["stop_reason"], body["usage"]
        else:
            events = typed_events(await response.text())
            blocks = {
                e["index"]: e["content_block"] for e in events if e["type"] == "content_block_start"
            }
            for event in events:
                if event["type"] == "content_block_delta":
                    kind = event["delta"].pop("type").removesuffix("_delta")
                    (piece,) = event["delta"].values()
                    block = blocks[event["index"]]
                    if kind == "input_json":
                        block["json"] = block.get("json", "") + piece
                    else:
                        block[kind] += piece
            thinking, text, call = (blocks[index] for index in range(3))
            assert call["input"] == {}
            call["input"] = json.loads(call.pop("json"))
            stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
            assert stops == [0, 1, 2]
            reason, usage = events[-2]["delta"]["stop_reason"], events[-2]["usage"]
        assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "hm")
        assert "signature" in thinking
        assert (text["type"], text["text"].strip()) == ("text", "I look.")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
        assert call["id"]
        assert reason == "tool_use"
        assert usage["output_tokens"] == len(TOKENIZER.encode(CALLS))

    run()


@on_http()
async def test_steps_that_gave_thoughts_alone_are_counted(scene: HttpScene) -> None:
    reply = post(scene)
    scene.say(await scene.command(), 0, "x", last=FinishReason.STOP)
    await reply
    (call,) = scene.dispatcher.calls
    events = MessageEvents("demo", call)
    pushed = [
        (MessageDelta(role="assistant", content=""), 1), (MessageDelta(reasoning_content="h"), 3),
        (MessageDelta(reasoning_content="m", content="So"), 2), (MessageDelta(content="."), 1),
    ]  # fmt: skip
    for message, num_tokens in pushed:
        list(events.push(message, num_tokens))
    receipt = Receipt(
        num_prompt_tokens=9, num_output_tokens=7, ttft_s=0.1, total_s=0.2, prefill_node="p",
        decode_node="d", prefill=None, decode=None,
    )  # fmt: skip
    list(events.last_events("stop", TextDelta("r", 6, (1,), ".", FinishReason.STOP, receipt)))
    assert events.whole().usage.output_tokens_details.thinking_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_blanks_alone_are_no_block_unless_they_are_all(stream: bool) -> None:
    @on_http(parsers=OutputParsers(TOKENIZER, "hermes", "none"), max_model_len=20_000)
    async def run(scene: HttpScene) -> None:
        call = '<tool_call>\n{"name": "f", "arguments": {"a"'
        for number, (text, kinds) in enumerate([("\n \n" + call, ["tool_use"]), (" ", ["text"])]):
            reply = post(scene, stream=stream, tools=[TOOL])
            scene.say(await scene.command(number + 1), 0, text, last=FinishReason.LENGTH)
            response = await reply
            if stream:
                events = typed_events(await response.text())
                blocks = [e["content_block"] for e in events if "content_block" in e]
            else:
                blocks = (await response.json())["content"]
            assert [block["type"] for block in blocks] == kinds
            if kinds == ["tool_use"]:
                assert blocks[0]["input"] == {}  # cut in its arguments: no JSON

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_has_a_status_before_the_stream_and_an_event_in_it(stream: bool) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        reply = post(scene, stream=stream)
        scene.fail(await scene.command(), "RESOURCE_EXHAUSTED", "no luck")
        response = await reply
        assert response.status == 429
        assert (await response.json())["error"]["type"] == "rate_limit_error"
        reply = post(scene, stream=stream)
        command = await scene.command(2)
        scene.say(command, 0, "one", last=FinishReason.ABORT)
        response = await reply
        if not stream:
            assert response.status == 500
            error = (await response.json())["error"]
        else:
            last = typed_events(await response.text())[-1]
            assert last["type"] == "error"
            error = last["error"]
        assert error == {"type": "api_error", "message": "the output was cut short on a node"}

    run()


@on_http()
async def test_leaving_a_stream_of_events_ends_the_call(scene: HttpScene) -> None:
    reply = post(scene, stream=True)
    scene.say(await scene.command(), 0, "one")
    response = await reply
    await response.content.readuntil(b"\n\n")
    response.close()
    await until(lambda: scene.dispatcher.num_open == 0)
    assert scene.decode.of(CancelCommand)


# ---------------------------------------------------------------- keys, limits, other paths


def test_the_key_may_come_as_anthropics_clients_send_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry_text("secret-1", "alice"), encoding="utf-8")

    @on_http(access=Access(keys_file=path))
    async def run(scene: HttpScene) -> None:
        bearer = {"Authorization": "Bearer secret-1"}
        for headers in ({}, {"x-api-key": "secret"}, {"x-api-key": "secret-1", **bearer}):
            scene.headers = headers  # (of two, none counts)
            response = await post(scene)
            assert response.status == 401
            body = await response.json()
            assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
            assert "secret" not in body["error"]["message"]
        for number, headers in enumerate(({"x-api-key": "secret-1"}, bearer)):
            scene.headers = headers
            reply = post(scene)
            scene.say(await scene.command(number + 1), 0, "x", last=FinishReason.STOP)
            assert (await reply).status == 200
        assert {call.terms.principal.name for call in scene.dispatcher.calls} == {"alice"}

    run()


@on_http()
async def test_a_caller_over_a_limit_is_refused_before_it_is_tokenized(
    scene: HttpScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(principal: object) -> None:
        raise OverloadedError("it has used its requests")

    monkeypatch.setattr(scene.dispatcher.admission, "check_key", refuse)
    for path in (PATH, f"{PATH}/count_tokens"):
        response = await scene.post(path, messages=HELLO, max_tokens=5)
        assert response.status == 429
        assert (await response.json())["error"]["type"] == "rate_limit_error"


@on_http(max_model_len=20_000)
async def test_tokens_are_counted_as_the_answer_would(scene: HttpScene) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    response = await scene.post(f"{PATH}/count_tokens", **fields)
    assert response.status == 200
    counted = await response.json()
    reply = post(scene, **fields)
    command = await scene.command()
    scene.say(command, 0, "x", last=FinishReason.STOP)
    await reply
    assert counted == {"input_tokens": len(command.prompt_token_ids)}
    assert {field.name for field in msgspec.structs.fields(CountTokensRequest)} >= set(fields)


@on_http()
async def test_paths_below_that_are_not_there_fail_in_the_same_words(scene: HttpScene) -> None:
    response = await scene.post(f"{PATH}/batches")
    assert response.status == 404
    assert (await response.json())["error"]["type"] == "not_found_error"
    async with scene.session.get(scene.url + PATH) as response:
        assert response.status == 405
        assert (await response.json())["type"] == "error"


@on_http()
async def test_what_the_model_cannot_be_told_of_thinking_is_said(scene: HttpScene) -> None:
    """(The demo model's template knows no thinking.)"""
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 4}},
            "thinking",
        ),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ]
    for number, (fields, told) in enumerate(cases, start=1):
        reply = post(scene, **fields)
        scene.say(await scene.command(number), 0, "x", last=FinishReason.STOP)
        assert (await reply).headers[IGNORED_FIELDS_HEADER] == told
