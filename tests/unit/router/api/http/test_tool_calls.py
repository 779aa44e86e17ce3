"""Calls of tools over the three HTTP APIs: what comes out, and what may be sent back."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.outputs import FinishReason
from tests.fakes.http_scene import HttpScene, on_http

pytestmark = pytest.mark.medium

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
    """It was 400 from there on, though the client sent back what the server had given."""

    @on_http(max_model_len=1000)
    async def run(scene: HttpScene) -> None:
        reply = scene.post(path, **conversation(path, arguments))
        scene.say(await scene.command(), 0, "one", last=FinishReason.STOP)
        assert (await reply).status == 200, await (await reply).text()

    run()
