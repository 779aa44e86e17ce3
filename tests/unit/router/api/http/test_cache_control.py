"""Marks of Anthropic's ``cache_control``: which prefix of the prompt each mark keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from baton.access.identity import ANYBODY
from baton.kv.pins import PrefixPin
from router.api.anthropic_messages.cache_control import pinned_prefixes
from router.api.anthropic_messages.request import MessagesRequest, chat_request
from router.api.http.exchange import PRINCIPAL, SERVED
from router.intake.texts import ChatPrompt

MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HELLO = [{"role": "user", "content": "x"}]


def prefixes(num_tokens: Callable[[ChatPrompt], int], **fields: Any) -> tuple[PrefixPin, ...]:
    """Return the pins of a request, where a function counts the tokens of each conversation."""

    async def tokenize(prompt: ChatPrompt, principal: object) -> list[int]:
        return [0] * num_tokens(prompt)

    body = {"model": "m", "max_tokens": 5, "messages": HELLO, **fields}
    given = msgspec.convert(body, MessagesRequest)
    intake = SimpleNamespace(reader=SimpleNamespace(tokenize=tokenize))
    request = {SERVED: SimpleNamespace(intake=intake, chat_template=""), PRINCIPAL: ANYBODY}
    return asyncio.run(pinned_prefixes(cast(web.Request, request), given, chat_request(given)))


def test_a_prefix_without_tokens_is_not_pinned() -> None:
    system = [{"type": "text", "text": "s", **MARK}]
    assert prefixes(lambda prompt: 0, system=system) == ()


@pytest.mark.parametrize("system", ["rules", [{"type": "text", "text": "rules"}]])
def test_a_mark_of_a_tool_keeps_the_system_prompt(system: Any) -> None:
    seen: list[str] = []

    def count(prompt: ChatPrompt) -> int:
        [message] = prompt.messages
        seen.append(str(message["content"]))
        return 7

    assert prefixes(count, system=system, tools=[{**TOOL, **MARK}]) == (PrefixPin(300.0, 7),)
    assert "rules" in seen[0]
