"""Parsers of outputs by name: of calls, and of reasoning. To add one: a file here and a line below.

The names are those of vLLM's options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.registry import Registry
from router.intake.parsers.base import OutputParser, ParserContext

AUTO, NONE = "auto", "none"  # chosen by the chat template; no parser


class ParserKind(Protocol):
    """Makes the parsers of one kind, one for each output.

    Attributes:
        special_tokens: that it reads: they must be in the text.
        inner_tokens: special tokens within an answer; no other ones are behind its beginning.
        takes_all: it finds reasoning and calls, both.
        make_id: makes ids of calls as the model's templates take them.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]: ...

    @property
    def inner_tokens(self) -> tuple[str, ...]: ...

    @property
    def takes_all(self) -> bool: ...

    @property
    def make_id(self) -> Callable[[], str]: ...

    def __call__(self, context: ParserContext) -> OutputParser: ...


TOOL_CALL_PARSERS: Registry[ParserKind] = Registry(
    "tool-call parser",
    {
        "hermes": "router.intake.parsers.hermes:Hermes",
        "llama3_json": "router.intake.parsers.llama3_json:Llama3Json",
        "mistral": "router.intake.parsers.mistral:Mistral",
        "qwen3_coder": "router.intake.parsers.qwen3_coder:Qwen3Coder",
        "deepseek_v3": "router.intake.parsers.deepseek:DeepSeek",
        "pythonic": "router.intake.parsers.pythonic:Pythonic",
        "openai": "router.intake.parsers.harmony:Harmony",
    },
)
REASONING_PARSERS: Registry[ParserKind] = Registry(
    "reasoning parser",
    {
        "qwen3": "router.intake.parsers.think:Think",
        "deepseek_r1": "router.intake.parsers.think:AlwaysThink",
        "openai_gptoss": "router.intake.parsers.harmony:Harmony",
    },
)
