"""Tool prompt: describes tools in the system message, for chat templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = """\
# Tools

You may call functions. Their signatures, as JSON, are within <tools></tools>:
<tools>
"""
_BEHIND = """
</tools>

To call one, write its name and its arguments, as JSON, within <tool_call></tool_call>:
<tool_call>
{"name": <function name>, "arguments": <arguments as a JSON object>}
</tool_call>"""


def with_one_system_turn(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Join the first system messages to one, and turn later system messages into user messages.

    Many templates allow only one system message, at the beginning. Returns None if nothing has to
    be changed.
    """
    is_system = [message.get("role") == "system" for message in messages]
    num_first = is_system.index(False) if False in is_system else len(messages)
    if num_first <= 1 and not any(is_system[num_first:]):
        return None
    texts = [str(message.get("content") or "") for message in messages[:num_first]]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    later = [
        {**message, "role": "user"} if message.get("role") == "system" else message
        for message in messages[num_first:]
    ]
    return [*first, *later]


def with_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    in_system_message: bool = True,
) -> list[dict[str, Any]]:
    """Write tools, calls and results into the texts of the messages, as Hermes models do.

    Args:
        in_system_message: whether tools are described in the system message; False: in the first
            message, for templates that do not allow system messages.
    """
    lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = f"{_BEFORE}{chr(10).join(lines)}{_BEHIND}"
    plain = _without_calls(messages)
    first = plain[0] if plain else {"role": "user", "content": ""}
    if first["role"] == "system":
        content = f"{first.get('content') or ''}\n\n{told}".lstrip()
        return [{**first, "content": content}, *plain[1:]]
    if in_system_message:
        return [{"role": "system", "content": told}, *plain]
    content = first.get("content") or ""
    # The content is a list of parts if the message has images.
    if isinstance(content, list):
        return [
            {**first, "content": [{"type": "text", "text": f"{told}\n\n"}, *content]},
            *plain[1:],
        ]
    return [{**first, "content": f"{told}\n\n{content}"}, *plain[1:]]


def _without_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn tool calls into text of the assistant, and their results into text of the user."""
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if was_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [*filter(None, [message.get("content")]), *map(_call_text, calls)]
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            plain.append({**kept, "content": "\n".join(texts)})
        else:
            plain.append(dict(message))
        was_result = is_result
    return plain


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"
