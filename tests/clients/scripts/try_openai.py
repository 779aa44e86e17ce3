"""The `openai` package: chats, completions, responses; streams, tools, parsed answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from pydantic import BaseModel, Field

from checks import (
    ANSWER,
    CITIES,
    MAX_TOKENS,
    MESSAGES,
    PERSON_QUESTION,
    QUESTION,
    SAYS_A_CALL,
    WEATHER,
    WEATHER_FUNCTION,
    System,
    refusal,
    run,
)

TOOL: Any = {"type": "function", "strict": True, **WEATHER_FUNCTION}


class Person(BaseModel):
    """A person whom a sentence describes."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def client_of(system: System) -> Any:
    return openai.OpenAI(base_url=system.base_url, api_key="none", max_retries=0)


def asked(system: System, **fields: Any) -> dict[str, Any]:
    """A greedy chat."""
    return {
        "model": system.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0,
        **fields,
    }  # fmt: skip


def models_are_listed(system: System) -> None:
    client = client_of(system)
    assert [model.id for model in client.models.list()] == [system.model]
    assert client.models.retrieve(system.model).id == system.model


def a_chat_streamed_or_not(system: System) -> None:
    client = client_of(system)
    whole = client.chat.completions.create(**asked(system))
    text = whole.choices[0].message.content
    assert ANSWER in (text or ""), text
    assert whole.choices[0].finish_reason == "stop"
    *chunks, last = client.chat.completions.create(
        **asked(system), stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage.total_tokens == whole.usage.total_tokens


def a_chat_by_the_helper_for_streams(system: System) -> None:
    with client_of(system).chat.completions.stream(**asked(system)) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert final.choices[0].message.content == text
    assert ANSWER in text


def chats_at_once(system: System) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=system.base_url, api_key="none") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(**asked(system)) for _ in range(4))
            )
        return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    assert ANSWER in (texts[0] or "")


def logprobs(system: System) -> None:
    answer = client_of(system).chat.completions.create(
        **asked(system), logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs.content
    assert len(found) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in found)


def several_completions_streamed_or_not(system: System) -> None:
    client = client_of(system)
    given: dict[str, Any] = {
        "model": system.model, "prompt": ["The capital of France is", "1, 2, 3,"],
        "max_tokens": 8, "temperature": 0,
    }  # fmt: skip
    texts = [choice.text for choice in client.completions.create(**given).choices]
    assert ANSWER in texts[0]
    assert "4" in texts[1]
    streamed = ["", ""]
    for chunk in client.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def a_required_tool_and_its_result(system: System) -> None:
    client = client_of(system)
    answer = client.chat.completions.create(
        **asked(system), tools=[WEATHER], tool_choice="required"
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees, light rain"}
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    follow_up = client.chat.completions.create(**asked(system, messages=history), tools=[WEATHER])
    assert follow_up.usage.prompt_tokens > answer.usage.prompt_tokens


def a_tool_that_the_model_calls_itself(system: System) -> None:
    with client_of(system).chat.completions.stream(
        **asked(system), tools=[WEATHER], extra_body=SAYS_A_CALL
    ) as events:
        deltas = [
            event.arguments_delta
            for event in events
            if event.type == "tool_calls.function.arguments.delta"
        ]
        choice = events.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert "".join(deltas) == call.function.arguments
    assert json.loads(call.function.arguments)["city"] in CITIES
    assert choice.finish_reason == "tool_calls"


def an_answer_parsed(system: System) -> None:
    messages = [{"role": "user", "content": PERSON_QUESTION}]
    answer = client_of(system).chat.completions.parse(
        **asked(system, messages=messages), response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Anna Schmidt", age=34)


def a_response_streamed_or_not(system: System) -> None:
    client = client_of(system)
    given: dict[str, Any] = {
        "model": system.model, "input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 0,
    }  # fmt: skip
    whole = client.responses.create(**given)
    assert whole.status == "completed"
    assert ANSWER in whole.output_text
    with client.responses.stream(**given) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text == whole.output_text


def a_response_with_a_tool(system: System) -> None:
    client = client_of(system)
    given: dict[str, Any] = {"model": system.model, "tools": [TOOL], "max_output_tokens": 60}
    answer = client.responses.create(**given, input=QUESTION, tool_choice="required")
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in CITIES
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    history = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    follow_up = client.responses.create(**given, input=history, tool_choice="none")
    assert follow_up.output_text


def a_response_parsed(system: System) -> None:
    answer = client_of(system).responses.parse(
        model=system.model, input=PERSON_QUESTION, text_format=Person, temperature=0,
        max_output_tokens=MAX_TOKENS,
    )  # fmt: skip
    assert answer.output_parsed == Person(name="Anna Schmidt", age=34)


def errors_are_its_own(system: System) -> None:
    client = client_of(system)
    cases: Any = (
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
    )
    for fields, kind in cases:
        error = refusal(kind, client.chat.completions.create, **{**asked(system), **fields})
        assert next(iter(fields)) in str(error)


if __name__ == "__main__":
    run(
        models_are_listed,
        a_chat_streamed_or_not,
        a_chat_by_the_helper_for_streams,
        chats_at_once,
        logprobs,
        several_completions_streamed_or_not,
        a_required_tool_and_its_result,
        a_tool_that_the_model_calls_itself,
        an_answer_parsed,
        a_response_streamed_or_not,
        a_response_with_a_tool,
        a_response_parsed,
        errors_are_its_own,
    )
