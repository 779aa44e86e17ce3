"""The demo model with a chat template that takes tools, and a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# The demo model has never seen a tool, so a grammar forces the call that a larger one makes.
SAYS_A_CALL = {
    "structured_outputs": {
        "regex": r'I look\. <tool_call>\n\{"name": "get_weather", "arguments": '
        r'\{"city": "(Bonn|Rome)"\}\}\n</tool_call>'
    }
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.arguments.city + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def link_model_with_tools(model: Path, folder: Path) -> None:
    """Fill a folder with a model's files and a template for tools."""
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
