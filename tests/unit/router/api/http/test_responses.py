"""Unit tests of the Responses API: items to messages, outputs to items, the events of streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.api.errors import InvalidRequestError
from baton.api.outputs import FinishReason
from baton.link.words import CancelCommand
from router.api.http.conversation import chat_prompt, effort_of
from router.api.http.event_exchange import as_fields
from router.api.http.ignored_fields import IGNORED_FIELDS_HEADER
from router.api.http.responses import FunctionDelta, MessageDelta, ToolCallDelta
from router.api.openai_responses.output import Event, Items
from router.api.openai_responses.request import FIELD_NAMES, ResponsesRequest, chat_request
from tests.fakes.network.event_source import typed_events
from tests.fakes.router.http_scene import HttpScene, on_http, until

pytestmark = pytest.mark.medium

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def given(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "x", **fields}, ResponsesRequest)


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in chat_prompt(chat_request(given(**fields))).messages]


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events, which are numbered from 0."""
    events = typed_events(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# ---------------------------------------------------------------- what comes in


def test_a_text_with_instructions_is_a_short_conversation() -> None:
    assert messages_of(instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
    ]


def test_what_the_assistant_thought_said_and_called_is_one_message() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                     {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "cold"}]},
        {"type": "message", "role": "assistant", "content": "So."},
        {"type": "message", "role": "assistant", "content": "Well."},
    ]  # fmt: skip
    system, user, turn, one, two, *rest = messages_of(input=items)
    assert system == {"role": "system", "content": "d"}
    assert user == {"role": "user", "content": "a\nb"}
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "I look.")
    calls = [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in turn["tool_calls"]
    ]
    assert calls == [("1", "f", "{}"), ("2", "g", '{"a": 1}')]
    assert one == {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    assert two == {"role": "tool", "content": "cold", "tool_call_id": "2"}
    assert [message["content"] for message in rest] == ["So.", "Well."]


def test_fields_arrive_under_the_names_of_chats() -> None:
    schema = {"type": "object"}
    chat = chat_request(
        given(
            max_output_tokens=9, temperature=0.5, top_p=0.9, reasoning={"effort": "low"},
            tools=[TOOL], tool_choice={"type": "function", "name": "f"}, stream=True,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        )
    )  # fmt: skip
    assert (chat.max_completion_tokens, chat.temperature, chat.top_p) == (9, 0.5, 0.9)
    assert (effort_of(chat), chat.stream) == ("low", True)
    assert chat.tools is not None
    assert chat.tools[0].function.name == "f"
    assert msgspec.to_builtins(chat.tool_choice)["function"]["name"] == "f"
    assert chat.response_format is not None
    assert chat.response_format.schema == schema


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.1), ("presence_penalty", 0.2),
        ("frequency_penalty", 0.3), ("logit_bias", {7: 1.5}), ("seed", 3), ("stop", ["x"]),
        ("stop_token_ids", [4]), ("ignore_eos", True), ("min_tokens", 2), ("session_id", "s"),
        ("priority", 1), ("cache_salt", "c"), ("chat_template_kwargs", {"a": 1}),
    ],
)  # fmt: skip
def test_what_chats_are_sampled_with_responses_are_too(name: str, value: object) -> None:
    assert getattr(chat_request(given(**{name: value})), name) == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "r"}, "previous_response_id: is not supported, as nothing is"),
        ({"conversation": "c"}, "conversation: is not supported"),
        ({"prompt": {"id": "p"}}, "prompt: is not supported"),
        ({"background": True}, "background: is not supported"),
        ({"input": []}, "input: must have at least 1 item, got 0"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role: is needed"),
        ({"input": [{"role": "user"}]}, "input[0].content: is needed"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url: is needed",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0]: must be of type input_text with a text, or input_image, got "
            "'input_audio'",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0].type: must be message, function_call, function_call_output or reasoning",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id: is needed"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id: is needed"),
        ({"input": [{"role": "user", "content": "x"}] * 8193}, "input: must have at most 8192"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name: is needed"),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
            "tools[0].format: needs a text and a syntax",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type: 'web_search' is no tool that"),
        ({"tools": [{"type": "function"}]}, "tools[0].name: is needed"),
        ({"tool_choice": "required"}, "tool_choice: is 'required', but there are no tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: is needed"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}},
            "text.format.schema: Invalid type: thing",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens: must be 1 or more, got 0"),
        ({"temperature": -1}, "temperature: must be 0 or more, got -1"),
        ({"input": [{"content": "x"}]}, "input[0].role: is needed"),
    ],
)
def test_a_wrong_request_names_the_field_that_its_client_wrote(
    fields: dict[str, Any], message: str
) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        response = await scene.post(PATH, **{"input": "x", **fields})
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["message"].startswith(message)
        assert error["param"] == message.partition(": ")[0]

    run()


def test_errors_about_other_fields_stay_as_they_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"^maximum: x$"), as_fields(FIELD_NAMES):
        raise InvalidRequestError("maximum", "x")


def test_errors_name_no_field_that_the_client_did_not_write() -> None:
    with pytest.raises(InvalidRequestError, match=r"^input: x$"), as_fields(FIELD_NAMES):
        raise InvalidRequestError("messages[1].tool_calls[0].function.arguments", "x")
    with (
        pytest.raises(
            InvalidRequestError, match=r"^structured_outputs: cannot be together with text.format$"
        ),
        as_fields(FIELD_NAMES),
    ):
        raise InvalidRequestError("structured_outputs", "cannot be together with response_format")


# ---------------------------------------------------------------- what goes out


@on_http()
async def test_an_answer_has_a_message_and_says_what_it_cost(scene: HttpScene) -> None:
    """Check the Responses API, the newer one of the `openai` package, which was missing."""
    reply = scene.post(PATH, input="x", store=True, temperature=0.5, include=["x"])
    scene.say(await scene.command(), 0, "one two", last=FinishReason.STOP)
    response = await reply
    assert response.headers[IGNORED_FIELDS_HEADER] == "include, store"
    body = await response.json()
    assert body["id"] == f"resp_{response.headers['X-Request-Id']}"
    assert (body["object"], body["status"], body["store"]) == ("response", "completed", False)
    assert (body["error"], body["incomplete_details"]) == (None, None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}
    ]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0


@on_http(sampling_defaults={"temperature": 0.25})
async def test_an_answer_says_what_it_was_sampled_with(scene: HttpScene) -> None:
    """Regression: the answer named OpenAI's default, but the checkpoint's was used."""
    reply = scene.post(PATH, input="x", top_p=0.5)
    command = await scene.command()
    scene.say(command, 0, "one", last=FinishReason.STOP)
    body = await (await reply).json()
    assert command.sampling_params.temperature == body["temperature"] == 0.25
    assert command.sampling_params.top_p == body["top_p"] == 0.5


@on_http()
async def test_a_stream_has_all_events_of_a_message(scene: HttpScene) -> None:
    reply = scene.post(PATH, input="x", stream=True, max_output_tokens=5)
    command = await scene.command()
    scene.say(command, 0, "one two", last=FinishReason.LENGTH)
    events = events_in(await (await reply).text())
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas), "output_text.done", "content_part.done",
        "output_item.done", "incomplete",
    ]  # fmt: skip
    assert "".join(deltas) == events[-4]["text"] == events[-3]["part"]["text"] == "one two"
    assert events[0]["response"]["status"] == "in_progress"
    last = events[-1]["response"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["status"] == "incomplete"
    assert events[2]["item"]["content"] == []
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_has_a_status_before_the_stream_and_an_event_in_it(stream: bool) -> None:
    @on_http()
    async def run(scene: HttpScene) -> None:
        reply = scene.post(PATH, input="x", stream=stream)
        scene.fail(await scene.command(), "RESOURCE_EXHAUSTED", "no luck")
        assert (await reply).status == 429
        if not stream:
            return
        reply = scene.post(PATH, input="x", stream=True)
        command = await scene.command(2)
        scene.say(command, 0, "one")
        response = await reply
        scene.fail(command, "RESOURCE_EXHAUSTED", "no luck")
        last = events_in(await response.text())[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "rate_limit_exceeded"
        assert last["response"]["error"]["message"].startswith("no luck")

    run()


@on_http()
async def test_an_output_that_is_cut_short_on_a_node_has_failed(scene: HttpScene) -> None:
    reply = scene.post(PATH, input="x")
    scene.say(await scene.command(), 0, "one", last=FinishReason.ABORT)
    body = await (await reply).json()
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")


@on_http()
async def test_leaving_a_stream_of_events_ends_the_call(scene: HttpScene) -> None:
    reply = scene.post(PATH, input="x", stream=True)
    scene.say(await scene.command(), 0, "one")
    response = await reply
    await response.content.readuntil(b"\n\n")
    response.close()
    await until(lambda: scene.dispatcher.num_open == 0)
    assert scene.decode.of(CancelCommand)


def push_all(messages: list[MessageDelta], status: str = "completed") -> tuple[Items, list[Event]]:
    items = Items()

    def events() -> Iterator[Event]:
        for message in messages:
            yield from items.push(message, 1)
        yield from items.end_answer(status)

    return items, list(events())


def test_reasoning_texts_and_calls_are_items_of_their_own_in_their_order() -> None:
    def call(index: int, arguments: str, name: str = "") -> ToolCallDelta:
        if not name:
            return ToolCallDelta(index, FunctionDelta(arguments))
        return ToolCallDelta(index, FunctionDelta(arguments, name), f"call_{index}", "function")

    items, events = push_all(
        [
            MessageDelta(role="assistant", content=""),
            MessageDelta(reasoning_content="h"),
            MessageDelta(reasoning_content="m"),
            MessageDelta(content="I look."),
            MessageDelta(tool_calls=[call(0, "", "f")]),
            MessageDelta(tool_calls=[call(0, '{"a"')]),
            MessageDelta(tool_calls=[call(0, ": 1}"), call(1, "{}", "g")]),
        ],
    )
    told = msgspec.to_builtins(items.items)
    assert [item["type"] for item in told] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert told[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert told[1]["content"][0]["text"] == "I look."
    assert [(i["call_id"], i["name"], i["arguments"]) for i in told[2:]] == [
        ("call_0", "f", '{"a": 1}'),
        ("call_1", "g", "{}"),
    ]
    assert {item["status"] for item in told} == {"completed"}
    assert items.num_reasoning_tokens == 2
    for index, item in enumerate(told):
        own = [event for event in events if event.output_index == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert msgspec.to_builtins(own[-1].item) == item
        whole = own[-2] if item["type"] == "function_call" else own[-3]
        deltas = "".join(event.delta or "" for event in own)
        assert deltas == (whole.arguments if item["type"] == "function_call" else whole.text)
    indices = [event.output_index or 0 for event in events]
    assert indices == sorted(indices)  # one after the other


def test_an_answer_without_a_word_has_an_empty_message() -> None:
    items, events = push_all([MessageDelta(role="assistant", content="")])
    (item,) = msgspec.to_builtins(items.items)
    assert item["content"][0]["text"] == ""
    assert events[-1].type == "response.output_item.done"
