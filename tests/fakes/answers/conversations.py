"""Random conversations as clients send them: system messages, turns, tool calls and results."""

from __future__ import annotations

import random
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

_WORDS = (
    "hello", "größe", "日本", "👩‍🚀", "<b>&amp;", "it's", '"quoted"', "{{ x }}", "{% if %}", "a\tb",
    "\n", "  ", "</think>", "<think>", "<|im_end|>", "\\n", "None", "0.1", "'", "`code`",
)  # fmt: skip
_TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "string", "enum": ["a", "ü"], "description": "one of <two>"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "number"}},
    {"type": ["string", "null"]},
)


def make_text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(0, 6)))


def make_value(rng: random.Random) -> Any:
    simple = (make_text(rng), rng.randint(-9, 9), 0.5, True, None)
    return rng.choice((*simple, [make_text(rng)], {"ключ": make_text(rng)}))


def make_tool(rng: random.Random, name: str) -> Tool:
    names = rng.sample(("city", "größe", "unit", "limit"), rng.randint(0, 4))
    function: dict[str, Any] = {"name": name, "description": make_text(rng)}
    function["parameters"] = {
        "type": "object",
        "properties": {one: dict(rng.choice(_TYPES)) for one in names},
        "required": names[:1],
    }
    return {"type": "function", "function": function}


def make_call(rng: random.Random) -> dict[str, Any]:
    arguments = {name: make_value(rng) for name in rng.sample(("city", "größe", "x"), 2)}
    function = {"name": rng.choice(("look_up", "f")), "arguments": arguments}
    return {"id": f"{rng.getrandbits(36):09x}", "type": "function", "function": function}


def make_conversation(rng: random.Random) -> tuple[list[Message], list[Tool]]:
    """Make messages that end with a user's or a tool's, and tools or none."""
    tools = [make_tool(rng, name) for name in ("look_up", "f")[: rng.randint(0, 2)]]
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": make_text(rng)})
    for _ in range(rng.randint(0, 3)):
        messages.append({"role": "user", "content": make_text(rng)})
        if tools and rng.random() < 0.6:
            messages += _calls_and_results(rng)
        answer: Message = {"role": "assistant", "content": make_text(rng)}
        if rng.random() < 0.3:
            answer["reasoning_content"] = make_text(rng)
        messages.append(answer)
    messages.append({"role": "user", "content": make_text(rng)})
    if tools and rng.random() < 0.4:
        messages += _calls_and_results(rng)
    return messages, tools


def _calls_and_results(rng: random.Random) -> list[Message]:
    calls = [make_call(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    content = rng.choice((None, "", "I look."))
    return [
        {"role": "assistant", "content": content, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": c["id"], "content": make_text(rng)} for c in calls),
    ]
