"""Parsers of outputs by name: of calls, and of reasoning. To add one: a file here and a line below.

The names are those of vLLM's options.
"""

from __future__ import annotations

from typing import Protocol

from baton.registry import Registry
from router.parsers.base import OutputParser, ParserContext


class ParserKind(Protocol):
    """Makes the parsers of one kind, one for each output.

    Attributes:
        special_tokens: that it reads: they must be in the text.
        takes_all: it finds reasoning and calls, both.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]: ...

    @property
    def takes_all(self) -> bool: ...

    def __call__(self, context: ParserContext) -> OutputParser: ...


TOOL_CALL_PARSERS: Registry[ParserKind] = Registry(
    "tool-call parser",
    {
        "hermes": "router.parsers.hermes:Hermes",
        "llama3_json": "router.parsers.llama3_json:Llama3Json",
        "mistral": "router.parsers.mistral:Mistral",
        "qwen3_coder": "router.parsers.qwen3_coder:Qwen3Coder",
        "deepseek_v3": "router.parsers.deepseek:DeepSeek",
        "pythonic": "router.parsers.pythonic:Pythonic",
        "openai": "router.parsers.harmony:Harmony",
    },
)
REASONING_PARSERS: Registry[ParserKind] = Registry(
    "reasoning parser",
    {
        "qwen3": "router.parsers.think:Think",
        "deepseek_r1": "router.parsers.think:AlwaysThink",
        "openai_gptoss": "router.parsers.harmony:Harmony",
    },
)
