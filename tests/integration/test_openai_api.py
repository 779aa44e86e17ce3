"""The clients `openai` and `anthropic`, a browser's reader and the pages' snippets on real nodes.

A deployment with NIXL, and the same model in one process to compare with.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from baton import SamplingParams
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.checkpoints.tool_model import SAYS_A_CALL, SCHEMA, WEATHER
from tests.fakes.network.event_source import EventSourceReader
from tests.fakes.time.waiting import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
MODEL = "demo"
MESSAGES: list[Any] = [{"role": "user", "content": "Write the function `is_empty(self)`"}]


@pytest.fixture(scope="module")
def client(api: LocalDeployment) -> Iterator[openai.OpenAI]:
    url = f"http://{api.config.http_listen}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(api: LocalDeployment) -> Iterator[anthropic.Anthropic]:
    url = f"http://{api.config.http_listen}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm(model_with_tools: Path) -> LLM:
    return LLM(str(model_with_tools), dtype="float32", num_threads=1)


def joined(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# ---------------------------------------------------------------------- chat


def test_a_chat_streamed_or_not_says_what_one_process_says(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=11)
    (expected,) = llm.chat(MESSAGES, params)
    given: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0.8,
        "seed": 11,
    }  # fmt: skip
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == expected.finish_reason.value
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected.token_ids)

    *chunks, last = list(
        client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    )
    assert len(chunks) > 1
    assert joined(chunks) == expected.text
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens is not None


def test_n_outputs_are_those_of_one_process(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(n=3, max_tokens=12, temperature=1.5, seed=3))
    given: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 1.5, "seed": 3,
        "n": 3,
    }  # fmt: skip
    texts = [choice.message.content for choice in client.chat.completions.create(**given).choices]
    assert texts == [completion.text for completion in expected]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_logprobs_are_those_of_one_process(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(max_tokens=6, temperature=0, logprobs=3))
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    found = logprobs.content
    assert [token.logprob for token in found] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-4
    )
    joined_bytes = b"".join(bytes(token.bytes or ()) for token in found)
    assert joined_bytes.decode() == expected.text
    for token in found:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stop=["(self"], max_tokens=50
    )
    assert answer.choices[0].message.content == "def is_empty"
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_holds(client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
        },
    }
    if stream:
        text = joined(list(client.chat.completions.create(**given, stream=True)))
    else:
        text = client.chat.completions.create(**given).choices[0].message.content or ""
    jsonschema.validate(json.loads(text), SCHEMA)


# ---------------------------------------------------------------------- tools


def test_a_tool_call_and_its_result_go_through_the_template(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "max_tokens": 100, "seed": 1}
    answer = client.chat.completions.create(**given, messages=MESSAGES, extra_body=SAYS_A_CALL)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look. "
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Bonn", "Rome")

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*MESSAGES, message.model_dump(), result]
    follow_up = client.chat.completions.create(**given, messages=history)
    assert follow_up.usage is not None
    assert answer.usage is not None
    assert follow_up.usage.prompt_tokens > answer.usage.prompt_tokens
    without = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="none", max_tokens=1
    )
    assert without.usage is not None
    assert without.usage.prompt_tokens < answer.usage.prompt_tokens  # the prompt has no tools


def test_the_arguments_of_a_call_are_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[WEATHER], max_tokens=100, stream=True,
            extra_body=SAYS_A_CALL,
        )
    )  # fmt: skip
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert joined(chunks) == "I look. "
    first, *rest = calls
    assert first.id
    assert first.function is not None
    assert first.function.name == "get_weather"
    # A busy router may send all arguments in the first chunk.
    assert all(call.id is None and call.index == 0 for call in rest)
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments)["city"] in ("Bonn", "Rome")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_required_tool_is_called_whatever_the_model_would_say(
    client: openai.OpenAI, choice: Any
) -> None:
    given: Any = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=100, **given)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Bonn", "Rome")
    assert message.content is None


# ---------------------------------------------------------------------- responses


def test_a_response_streamed_or_not_says_what_a_chat_says(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=11)
    (expected,) = llm.chat(MESSAGES, params)
    given: dict[str, Any] = {
        "model": MODEL, "input": MESSAGES, "max_output_tokens": 24, "temperature": 0.8,
        "extra_body": {"seed": 11},
    }  # fmt: skip
    whole = client.responses.create(**given)
    assert whole.output_text == expected.text
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(expected.token_ids)
    assert (
        whole.status == {"stop": "completed", "length": "incomplete"}[expected.finish_reason.value]
    )
    events: list[Any] = list(client.responses.create(**given, stream=True))
    kinds = [event.type for event in events]
    told = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(told) == events[-1].response.output_text == expected.text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_a_tool_and_takes_its_result(client: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    given: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_output_tokens": 100}
    one_call = {"tool_choice": "required", "parallel_tool_calls": False}
    asked: dict[str, Any] = {**given, "input": MESSAGES, **one_call}
    if stream:
        with client.responses.stream(**asked) as events:
            answer: Any = events.get_final_response()
    else:
        answer = client.responses.create(**asked)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Bonn", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history: Any = [*MESSAGES, call.model_dump(exclude_none=True), result]
    follow_up = client.responses.create(**given, input=history)
    usages: list[Any] = [answer.usage, follow_up.usage]
    assert usages[1].input_tokens > usages[0].input_tokens


def test_a_response_fits_a_schema(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input=MESSAGES, max_output_tokens=200,
        text={"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}},
    )  # fmt: skip
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)


# ---------------------------------------------------------------------- Anthropic's messages


def test_a_message_streamed_or_not_says_what_a_chat_says(
    claude: anthropic.Anthropic, llm: LLM
) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0.8, seed=11))
    given: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": 24,
        "extra_body": {"seed": 11, "temperature": 0.8},
    }  # fmt: skip
    whole = claude.messages.create(**given)
    with claude.messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        block: Any = answer.content[0]
        assert (block.type, block.text) == ("text", expected.text)
        assert (
            answer.stop_reason
            == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason.value]
        )
        assert answer.usage.output_tokens == len(expected.token_ids)
        cached = answer.usage.cache_read_input_tokens or 0
        count = claude.messages.count_tokens(model=MODEL, messages=MESSAGES)
        assert answer.usage.input_tokens + cached == count.input_tokens
    assert text == expected.text
    stop = expected.text[6:9]
    cut = claude.messages.create(**given, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_calls_a_tool_and_takes_its_result(
    claude: anthropic.Anthropic, stream: bool
) -> None:
    function = WEATHER["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    given: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_tokens": 100}
    one_call = {"type": "any", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {**given, "messages": MESSAGES, "tool_choice": one_call}
    if stream:
        with claude.messages.stream(**asked) as events:
            answer: Any = events.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Bonn", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [
        *MESSAGES, {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    follow_up = claude.messages.create(**given, messages=history)

    def num_input(usage: anthropic.types.Usage) -> int:
        return usage.input_tokens + (usage.cache_read_input_tokens or 0)

    assert num_input(follow_up.usage) > num_input(answer.usage)


def test_the_errors_of_messages_are_those_of_the_package(claude: anthropic.Anthropic) -> None:
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES}
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be 1 or more, got 0"):
        claude.messages.create(**{**given, "max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError, match="model: 'other' does not") as raised:
        claude.messages.create(**{**given, "model": "other"})
    assert raised.value.request_id


# ---------------------------------------------------------------------- completions


def test_completions_of_texts_and_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    texts = ["def add(a, b):\n", "class Stack:\n"]
    params = SamplingParams(max_tokens=10, temperature=0)
    expected = [completion.text for completion in llm.generate(texts, params)]
    forms: list[Any] = [texts, [llm.tokenizer.encode(text) for text in texts]]
    for prompt in forms:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=10, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
    for prompt in (texts[0], llm.tokenizer.encode(texts[0])):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=10, temperature=0)
        assert [choice.text for choice in answer.choices] == expected[:1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_covers_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    prompt = "def add(a, b):\n"
    given: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True,
        "logprobs": 1,
    }  # fmt: skip
    if stream:
        choices = [c.choices[0] for c in client.completions.create(**given, stream=True)]
    else:
        choices = list(client.completions.create(**given).choices)
    text = "".join(choice.text for choice in choices)
    assert text.startswith(prompt)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens or ()]
    offsets = [offset for part in parts for offset in part.text_offset or ()]
    logprobs = [value for part in parts for value in part.token_logprobs or ()]
    assert "".join(tokens) == text
    assert [text[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)] == tokens
    assert logprobs[0] is None
    assert all(value is not None for value in logprobs[1:])


# ---------------------------------------------------------------------- errors, ends, readers


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (openai.NotFoundError, {"model": "other"}, "model: 'other' does not exist here"),
        (openai.BadRequestError, {"temperature": -1}, "temperature: must be 0 or more, got -1"),
        (
            openai.BadRequestError,
            {"extra_body": {"bad_words": ["x"]}},
            "bad_words: is not supported",
        ),
        (openai.BadRequestError, {"prompt": "x " * 3000}, "prompt is too long: "),
    ],
)
def test_the_client_raises_its_own_errors(
    client: openai.OpenAI, kind: type[openai.APIStatusError], fields: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 2, **fields}
    with pytest.raises(kind) as caught:
        client.completions.create(**given)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"].startswith(message)
    assert caught.value.request_id


def test_the_client_is_told_which_of_its_fields_have_no_effect(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, verbosity="low",
        prediction={"type": "content", "content": "x"}, reasoning_effort="low",
        modalities=["text"], store=True, metadata={"a": "b"},
    )  # fmt: skip
    told = raw.headers["X-Baton-Ignored-Fields"].split(", ")
    assert sorted(told) == ["prediction", "reasoning_effort", "verbosity"]


def test_the_client_gives_the_request_its_name(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["X-Request-Id"] == "mine"
    assert raw.parse().id == "cmpl-mine"


def test_the_models_and_the_probes(client: openai.OpenAI, api: LocalDeployment) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    for path in ("health", "ready"):
        with urllib.request.urlopen(f"http://{api.config.http_listen}/{path}") as response:
            assert response.status == 200


def test_leaving_a_stream_ends_the_request_on_the_nodes(
    client: openai.OpenAI, api: LocalDeployment
) -> None:
    def open_requests() -> list[str]:
        found = []
        for name in ("p0", "d0"):
            command = ["admin", "requests", name, "--router", api.config.listen]
            shown = subprocess.run(
                [sys.executable, "-m", "baton", *command],
                capture_output=True, text=True, timeout=60, check=True,
            ).stdout  # fmt: skip
            found += re.findall(r"leaver\S*", shown)
        return found

    with client.completions.create(
        model=MODEL, prompt="x", max_tokens=2000, stream=True,
        extra_headers={"X-Request-Id": "leaver"}, extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
        wait_until(open_requests, "the request on the nodes")  # it may be tried again
    wait_until(lambda: not open_requests(), "the end of the request on the nodes")


def test_a_browsers_reader_gets_each_event(api: LocalDeployment) -> None:
    async def read() -> list[str]:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 8,
                "temperature": 0}  # fmt: skip
        url = f"http://{api.config.http_listen}/v1/chat/completions"
        reader, found = EventSourceReader(), []
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            async for data in response.content.iter_chunked(7):  # cut anywhere
                found += list(reader.push(data))
        return found

    *chunks, done = asyncio.run(read())
    assert done == "[DONE]"
    pieces = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces).startswith("def is_empty")


def _snippets(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", ["sh", "python"])
@pytest.mark.parametrize("page", ["openai_api.md", "anthropic_api.md"])
def test_the_snippets_of_the_pages_work(api: LocalDeployment, page: str, language: str) -> None:
    snippets = [text for text in _snippets(page, language) if "baton up" not in text]
    assert snippets
    for text in snippets:
        code = text.replace("127.0.0.1:8000", api.config.http_listen)
        command = ["sh", "-ec", code] if language == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), text
        assert '"error"' not in done.stdout, done.stdout


def test_the_metrics_have_counted_all_this(api: LocalDeployment, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="x", max_tokens=2)
    with urllib.request.urlopen(f"http://{api.config.http_listen}/metrics") as response:
        text = response.read().decode()
    assert re.search(r'^baton_router_requests_total\{outcome="length"\} [1-9]', text, re.MULTILINE)
    assert 'baton_router_nodes{role="prefill",state="ready"} 1.0' in text
