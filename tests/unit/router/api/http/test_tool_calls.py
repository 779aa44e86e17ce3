"""Tests of tool calls over the three HTTP APIs: calls in answers, and results in requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.api.outputs import FinishReason
from baton.text.grammars import load_grammar_tokenizer, make_grammar
from tests.fakes.router.http_scene import TOKENIZER, HttpScene, on_http

pytestmark = pytest.mark.medium

GRAMMAR_TOKENIZER = load_grammar_tokenizer(TOKENIZER.folder / "tokenizer.json", [4095])

CUT = '{"text": "def f(x):\\n    retur'


def conversation(path: str, arguments: str) -> dict[str, Any]:
    """Make a request whose history has a call with these arguments, and the call's result."""
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "write", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": "c", "output": "wrong"}
        return {"input": [{"role": "user", "content": "x"}, call, result]}
    function = {"name": "write", "arguments": arguments}
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "wrong"},
    ]
    return {"messages": messages}


@pytest.mark.parametrize("arguments", [CUT, "{", "", "null", "5", "nonsense", '"{}"'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_conversation_goes_on_after_a_call_that_was_cut(path: str, arguments: str) -> None:
    """A client that sent back what the server had given got 400 from there on."""

    @on_http(max_model_len=1000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(path, **conversation(path, arguments))
        scene.say(await scene.command(), 0, "one", last=FinishReason.STOP)
        assert (await reply).status == 200, await (await reply).text()

    run()


SCHEMA = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}},
    "required": ["done"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
# Over each API: a tool beside a format that is of the text.
WITH_FORMAT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
    "/v1/responses": {
        "input": "x",
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 100,
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.mark.parametrize("text", [CALL, '{"done": true}'])
@pytest.mark.parametrize("path", WITH_FORMAT)
def test_a_model_may_call_tools_beside_a_response_format(path: str, text: str) -> None:
    """Regression: the format's grammar applied from the first token, so no call was possible."""

    @on_http(max_model_len=1000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(path, **WITH_FORMAT[path])
        command = await scene.command()
        output = command.sampling_params.structured_output
        assert output is not None
        matcher = LLMatcher(GRAMMAR_TOKENIZER, make_grammar(output))
        token_ids = TOKENIZER.encode(text)
        assert matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert matcher.is_accepting()
        scene.say(command, 0, text, last=FinishReason.STOP)
        response = await reply
        assert response.status == 200, await response.text()
        body = await response.json()
        said = json.dumps(body.get("output") or body.get("content") or body.get("choices"))
        assert ('"look"' in said) is (text == CALL)
        assert ("done" in said) is (text != CALL)

    run()


@pytest.mark.parametrize("choice", ["none", "required"])
def test_a_response_format_holds_alone_or_not_at_all_where_that_is_chosen(choice: str) -> None:
    path = "/v1/chat/completions"

    @on_http(max_model_len=1000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(path, **WITH_FORMAT[path], tool_choice=choice)
        command = await scene.command()
        output = command.sampling_params.structured_output
        assert output is not None
        assert ("look" in output.text, "done" in output.text) == (
            (False, True) if choice == "none" else (True, False)
        )
        scene.say(command, 0, "x", last=FinishReason.STOP)
        await reply

    run()


@on_http()
async def test_a_format_that_is_no_json_cannot_be_beside_tools(scene: HttpScene) -> None:
    path = "/v1/chat/completions"
    given = {**WITH_FORMAT[path], "response_format": {"type": "regex", "pattern": "a"}}
    response = await scene.post(path, **given)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "response_format"


SHELL = {"type": "function", "name": "shell", "parameters": PARAMETERS}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits."}
OTHERS = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"}]
MCP = {"type": "namespace", "name": "mcp", "tools": [{**SHELL, "name": "look"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_run_elsewhere_are_dropped_and_told(stream: bool) -> None:
    """Regression: tools of other types than functions were errors, which kept Codex out."""

    @on_http(max_model_len=2000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(
            "/v1/responses",
            input="x",
            max_output_tokens=50,
            tools=[SHELL, *OTHERS, MCP],
            stream=stream,
        )
        command = await scene.command()
        prompt = TOKENIZER.decode(command.prompt_token_ids)
        assert '"shell"' in prompt
        assert '"mcp__look"' in prompt
        assert "web_search" not in prompt
        called = CALL.replace("look", "mcp__look")
        scene.say(command, 0, called, last=FinishReason.STOP)
        response = await reply
        told = response.headers["X-Baton-Ignored-Fields"]
        assert told == "tools.web_search, tools.local_shell, tools.image_generation"
        text = await response.text()
        assert '"namespace":"mcp"' in text
        assert '"name":"look"' in text

    run()


@on_http(max_model_len=2000)
async def test_a_custom_tool_is_called_with_a_text(scene: HttpScene) -> None:
    reply = scene.post("/v1/responses", input="x", tools=[PATCH], stream=True)
    command = await scene.command()
    call = (
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** a\\n+b"}}\n</tool_call>'
    )
    scene.say(command, 0, call, last=FinishReason.STOP)
    lines = (await (await reply).text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    kinds = [event["type"] for event in events]
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert events[3]["delta"] == events[4]["input"] == "*** a\n+b"
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call", "apply_patch", "*** a\n+b",
    )  # fmt: skip


REGEX = {"type": "grammar", "syntax": "regex", "definition": "add|del"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "add" | "del"'}


def patch_call(text: str) -> str:
    call = json.dumps({"name": "apply_patch", "arguments": {"input": text}})
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("form", [REGEX, LARK])
@pytest.mark.parametrize(
    "choice", [{"type": "custom", "name": "apply_patch"}, "required", "auto", None]
)
def test_a_custom_tool_is_held_to_its_format(choice: Any, form: dict[str, str]) -> None:
    """A grammar in Lark was told to the model only, and a regex held forced calls only."""

    @on_http(max_model_len=2000)
    async def run(scene: HttpScene) -> None:
        tools = [{**PATCH, "format": form}, SHELL]
        reply = scene.post("/v1/responses", input="x", tools=tools, tool_choice=choice)
        command = await scene.command()
        output = command.sampling_params.structured_output
        assert output is not None
        is_free = choice in ("auto", None)
        for text, fits in (
            (patch_call("add"), True),
            (patch_call("mul"), False),
            ("I look.", is_free),
            ("I look.\n" + patch_call("del"), is_free),
            ("I look.\n" + patch_call("mul"), False),
        ):
            matcher = LLMatcher(GRAMMAR_TOKENIZER, make_grammar(output))
            token_ids = TOKENIZER.encode(text)
            is_taken = matcher.try_consume_tokens(token_ids) == len(token_ids)
            assert (is_taken and matcher.is_accepting()) is fits, text
        scene.say(command, 0, patch_call("add"), last=FinishReason.STOP)
        response = await reply
        assert "X-Baton-Ignored-Fields" not in response.headers
        (item,) = (await response.json())["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", "add")

    run()


@on_http(max_model_len=2000)
async def test_a_grammar_that_cannot_hold_a_text_is_refused_by_name(scene: HttpScene) -> None:
    for definition, problem in (
        ("start: /a(?=b)/", "the grammar of 'apply_patch': /a(?=b)/: look-around cannot"),
        (
            "start: <|end|>",
            "the grammar of 'apply_patch': <|end|>: a text's grammar cannot name tokens",
        ),
    ):
        form = {**LARK, "definition": definition}
        tools = [{**PATCH, "format": form}]
        response = await scene.post("/v1/responses", input="x", tools=tools)
        assert response.status == 400
        error = (await response.json())["error"]
        assert (error["param"], problem in error["message"]) == ("tools", True), error


@on_http(max_model_len=2000)
async def test_items_of_tools_of_any_type_are_read(scene: HttpScene) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "+b"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "Done 1"},
        {"type": "local_shell_call", "call_id": "b", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "b", "output": "Done 2"},
        {"type": "function_call", "call_id": "c", "name": "look", "namespace": "mcp"},
        {"type": "function_call_output", "call_id": "c", "output": "Done 3"},
    ]
    reply = scene.post("/v1/responses", input=items, tools=[PATCH])
    command = await scene.command()
    prompt = TOKENIZER.decode(command.prompt_token_ids)
    for text in ('"input": "+b"', '"local_shell"', '"mcp__look"', "Done 1", "Done 2", "Done 3"):
        assert text in prompt
    scene.say(command, 0, "x", last=FinishReason.STOP)
    assert (await reply).status == 200


@on_http(max_model_len=2000)
async def test_tools_and_blocks_of_anthropics_own_are_passed_over(scene: HttpScene) -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "It rains."},
    ]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "y"},
    ]
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "look"}]
    reply = scene.post("/v1/messages", messages=messages, tools=tools, max_tokens=9)
    command = await scene.command()
    prompt = TOKENIZER.decode(command.prompt_token_ids)
    assert "It rains." in prompt
    assert '"look"' in prompt
    assert "web_search" not in prompt
    scene.say(command, 0, "x", last=FinishReason.STOP)
    response = await reply
    assert response.headers["X-Baton-Ignored-Fields"] == "tools.web_search_20250305"


SEEN = {"type": "text", "text": "a.png is this:"}
RESULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "image_url",
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look"}}]},
                {"role": "tool", "tool_call_id": "a", "content": [SEEN, {"type": "image_url"}]},
            ]
        },
    ),
    "/v1/messages": (
        "image",
        {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [SEEN, {"type": "image", "source": {"type": "base64"}}],
                        }
                    ],
                },
            ],
            "max_tokens": 9,
        },
    ),
    "/v1/responses": (
        "input_image",
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "a", "name": "look"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [
                        {**SEEN, "type": "input_text"},
                        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                    ],
                },
            ]
        },
    ),
}


@pytest.mark.parametrize("path", RESULTS)
def test_an_image_in_the_result_of_a_tool_does_not_end_the_conversation(path: str) -> None:
    """An agent sends the result again with each later request: all of them were refused."""
    kind, body = RESULTS[path]

    @on_http(max_model_len=2000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(path, **body)
        command = await scene.command()
        prompt = TOKENIZER.decode(command.prompt_token_ids)
        assert f"a.png is this:\n[{kind}: not shown, because you read text only]" in prompt
        scene.say(command, 0, "x", last=FinishReason.STOP)
        response = await reply
        assert response.status == 200
        assert response.headers["X-Baton-Ignored-Fields"] == f"messages.tool.{kind}"

    run()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("several", "num_calls"), [(None, 2), (True, 2), (False, 1)])
def test_a_request_may_allow_one_call_only(
    stream: bool, several: bool | None, num_calls: int
) -> None:
    """Regression: clients that run one call at a time got a second one."""
    path = "/v1/chat/completions"
    given = {name: WITH_FORMAT[path][name] for name in ("messages", "tools")}

    @on_http(max_model_len=1000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(path, **given, parallel_tool_calls=several, stream=stream)
        command = await scene.command()
        scene.say(command, 0, f"I look.\n{CALL}\n{CALL}", last=FinishReason.STOP)
        text = await (await reply).text()
        assert text.count('"name":"look"') == num_calls
        assert text.count('"finish_reason":"tool_calls"') == 1

    run()
