"""Families: one row for each way in which models write calls or reasoning.

A row has texts by which a chat template shows the family, the marks of calls or reasoning, and the
form of call ids. Parsers use the rows to read outputs, and `router/intake/answers/call_forms.py` to
write grammars.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from baton.text.thoughts.marks import SEED_THINK, THINK, ThoughtMarks
from router.intake.parsers.base import MakeId, OutputParser, ParserContext, new_call_id
from router.intake.parsers.harmony import HarmonyForm
from router.intake.parsers.json_calls import BareJsonForm, JsonForm
from router.intake.parsers.mistral import MistralForm, new_short_id
from router.intake.parsers.named import NamedForm
from router.intake.parsers.pythonic import PythonForm
from router.intake.parsers.tagged import TaggedForm
from router.intake.parsers.think import ThinkForm


class CallForm(Protocol):
    """The marks of a family's calls, and their parser.

    Attributes:
        special_tokens: marks that are special tokens in some checkpoints; parsers must get them.
        begins: marks that calls may begin with; empty: calls have no mark.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]: ...

    @property
    def begins(self) -> tuple[str, ...]: ...

    def make_parser(self, context: ParserContext, make_id: MakeId) -> OutputParser: ...


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models writes calls.

    Attributes:
        signs: a chat template that contains one of these texts belongs to the family.
        new_id: makes a call's id from the function's name and the number of earlier calls, in the
            form that the family's templates show.
        takes_all: whether the parser of calls also parses reasoning.
    """

    form: CallForm
    signs: tuple[str, ...]
    new_id: Callable[[str, int], str] = new_call_id
    takes_all: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.form.special_tokens

    def __call__(self, context: ParserContext) -> OutputParser:
        return self.form.make_parser(context, self.make_ids(context))

    def make_ids(self, context: ParserContext) -> MakeId:
        """Return a function that makes the ids of the calls in one output."""
        numbers = itertools.count(context.num_calls)
        return lambda name: self.new_id(name, next(numbers))


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a family of models marks its reasoning.

    Attributes:
        signs: a chat template that contains one of these texts belongs to the family.
        takes_all: whether the parser of reasoning also parses calls.
    """

    form: ThinkForm | HarmonyForm
    signs: tuple[str, ...]
    takes_all: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.form.special_tokens

    @property
    def marks(self) -> ThoughtMarks:
        return self.form.marks

    def __call__(self, context: ParserContext) -> OutputParser:
        return self.form.make_parser(context)


def numbered_id(name: str, number: int) -> str:
    """Return a call id in the form of Kimi's templates."""
    return f"functions.{name}:{number}"


# If a chat template contains signs of several rows, the first row is chosen.
CALLS: dict[str, Family] = {
    "openai": Family(HarmonyForm(), ("<|channel|>",), takes_all=True),
    "glm45": Family(
        TaggedForm(
            open="<tool_call>",
            close="</tool_call>",
            key="<arg_key>",
            key_end="</arg_key>",
            value="<arg_value>",
            value_end="</arg_value>",
        ),
        ("<arg_key>",),
    ),
    "seed_oss": Family(
        TaggedForm(
            open="<seed:tool_call>",
            close="</seed:tool_call>",
            function="<function=",
            name_end=">",
            key="<parameter=",
            key_end=">",
            value_end="</parameter>",
            end="</function>",
        ),
        ("<seed:tool_call>",),
    ),
    "qwen3_coder": Family(
        TaggedForm(
            open="<tool_call>",
            close="</tool_call>",
            function="<function=",
            name_end=">",
            key="<parameter=",
            key_end=">",
            value_end="</parameter>",
            end="</function>",
            has_lines=True,
        ),
        ("<function=",),
    ),
    "hermes": Family(JsonForm(("<tool_call>",), "</tool_call>"), ("<tool_call>",)),
    "phi4_mini_json": Family(
        JsonForm(("functools", "<|tool_call|>"), "<|/tool_call|>", is_list=True),
        ("functools[", "<|/tool_call|>"),
    ),
    "granite": Family(
        JsonForm(("<|tool_call|>", "<tool_call>"), "", is_list=True), ("<|tool_call|>",)
    ),
    "nemotron_json": Family(
        JsonForm(("<TOOLCALL>",), "</TOOLCALL>", is_list=True), ("<TOOLCALL>",)
    ),
    "mistral": Family(MistralForm(), ("[TOOL_CALLS]",), new_short_id),
    "kimi_k2": Family(
        NamedForm(
            all_open="<|tool_calls_section_begin|>",
            all_close="<|tool_calls_section_end|>",
            open="<|tool_call_begin|>",
            separator="<|tool_call_argument_begin|>",
            close="<|tool_call_end|>",
            prefix="functions.",
        ),
        ("<|tool_call_argument_begin|>", "<|im_system|>tool_declare"),
        numbered_id,
    ),
    "deepseek_v31": Family(
        NamedForm(
            all_open="<｜tool▁calls▁begin｜>",
            all_close="<｜tool▁calls▁end｜>",
            open="<｜tool▁call▁begin｜>",
            separator="<｜tool▁sep｜>",
            close="<｜tool▁call▁end｜>",
        ),
        ("<｜tool▁sep｜>tool_call_arguments", "<｜tool▁sep｜>' + tool['function']['arguments']"),
    ),
    "deepseek_v3": Family(
        NamedForm(
            all_open="<｜tool▁calls▁begin｜>",
            all_close="<｜tool▁calls▁end｜>",
            open="<｜tool▁call▁begin｜>",
            separator="<｜tool▁sep｜>",
            close="<｜tool▁call▁end｜>",
            is_fenced=True,
        ),
        ("tool▁call▁begin",),
    ),
    "olmo3": Family(
        PythonForm("<function_calls>", "</function_calls>", is_marked=True, is_list=False),
        ("<function_calls>",),
    ),
    "lfm2": Family(
        PythonForm("<|tool_call_start|>", "<|tool_call_end|>", is_marked=True),
        ("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    "pythonic": Family(PythonForm("<|python_start|>", "<|python_end|>"), ("[func_name1(",)),
    "llama3_json": Family(BareJsonForm("<|python_tag|>"), ("<|python_tag|>", '"parameters": ')),
}
THOUGHTS: dict[str, Thoughts] = {
    "openai_gptoss": Thoughts(HarmonyForm(), ("<|channel|>",), takes_all=True),
    "seed_oss": Thoughts(ThinkForm(SEED_THINK), ("<seed:think>",)),
    "qwen3": Thoughts(ThinkForm(THINK), ("</think>", "<think>")),
    "deepseek_r1": Thoughts(ThinkForm(replace(THINK, always_thinks=True)), ()),
}


def family_of(template: str, rows: Mapping[str, Family] | Mapping[str, Thoughts]) -> str | None:
    """Return the name of the first row that has a sign in a chat template, or None."""
    signs = ((name, sign) for name, row in rows.items() for sign in row.signs)
    return next((name for name, sign in signs if sign in template), None)
