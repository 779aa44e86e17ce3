"""`langchain-openai`: texts, streams, bound tools, structured output, by chats and responses."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from checks import (
    ANSWER,
    CITIES,
    MAX_TOKENS,
    PERSON_QUESTION,
    QUESTION,
    SAYS_A_CALL,
    WEATHER_QUESTION,
    System,
    run,
)


class Person(BaseModel):
    """A person whom a sentence describes."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"4 degrees in {city}"


def chat_of(system: System, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=system.model, base_url=system.base_url, api_key="none", temperature=0,
        max_tokens=MAX_TOKENS, max_retries=0, stream_usage=True, **fields,
    )  # fmt: skip


def invoke_and_stream(system: System) -> None:
    chat = chat_of(system)
    answer = chat.invoke(QUESTION)
    assert ANSWER in answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    whole: Any = None
    for chunk in chat.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == answer.text
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


def a_batch_and_async(system: System) -> None:
    chat = chat_of(system)
    first, second = chat.batch([QUESTION, QUESTION])
    assert first.text == second.text
    assert ANSWER in asyncio.run(chat.ainvoke(QUESTION)).text


def responses(system: System) -> None:
    chat = chat_of(system, use_responses_api=True)
    answer = chat.invoke(QUESTION)
    assert ANSWER in answer.text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == answer.text


def bound_tools(system: System) -> None:
    for use_responses_api in (False, True):
        chat = chat_of(system, use_responses_api=use_responses_api)
        question = HumanMessage(WEATHER_QUESTION)
        asked = chat.bind_tools([get_weather], tool_choice="any").invoke([question])
        assert isinstance(asked, AIMessage)
        (call,) = asked.tool_calls
        assert call["name"] == "get_weather"
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        follow_up = chat.bind_tools([get_weather]).invoke([question, asked, result])
        assert follow_up.content or follow_up.tool_calls


def a_tool_that_the_model_calls_itself(system: System) -> None:
    chat = chat_of(system, extra_body=SAYS_A_CALL).bind_tools([get_weather])
    whole: Any = None
    for chunk in chat.stream(WEATHER_QUESTION):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert call["args"]["city"] in CITIES


def structured_output(system: System) -> None:
    for method in ("json_schema", "function_calling"):
        chat = chat_of(system).with_structured_output(Person, method=method)
        assert chat.invoke(PERSON_QUESTION) == Person(name="Anna Schmidt", age=34), method
    as_json = chat_of(system).with_structured_output(Person, method="json_mode", include_raw=True)
    assert as_json.invoke(f"{PERSON_QUESTION} Answer in JSON.")["raw"].text.startswith("{")
    by_responses = chat_of(system, use_responses_api=True).with_structured_output(Person)
    assert by_responses.invoke(PERSON_QUESTION) == Person(name="Anna Schmidt", age=34)


def completions(system: System) -> None:
    model = OpenAI(
        model=system.model, base_url=system.base_url, api_key="none", temperature=0, max_tokens=8
    )
    text = model.invoke("The capital of France is")
    assert ANSWER in text
    assert "".join(model.stream("The capital of France is")) == text


if __name__ == "__main__":
    run(
        invoke_and_stream,
        a_batch_and_async,
        responses,
        bound_tools,
        a_tool_that_the_model_calls_itself,
        structured_output,
        completions,
    )
