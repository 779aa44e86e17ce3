"""OutputParsers: which parsers a model's outputs go through, by its chat template or as told."""

from __future__ import annotations

import json
from collections.abc import Sequence

from baton.registry import Registry
from baton.text.tokenizer import Tokenizer
from router.intake.answers.call_forms import FORMS, Function, answer_or_calls
from router.intake.parsers import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS, ParserKind
from router.intake.parsers.base import OutputParser, ParserContext, new_call_id
from router.intake.parsers.plain import CallsOrText, OneCall, PlainText
from router.intake.parsers.think import ThinkFirst

# What a template says of its model, the first that it says.
_CALLS = (
    ("<|channel|>", "openai"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("tool▁call▁begin", "deepseek_v3"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
_REASONING = (("<|channel|>", "openai_gptoss"), ("</think>", "qwen3"))
_PROMPT_END_TOKENS = 8
_MAX_PROMPT_END_TOKENS = 8_192  # a millisecond


class OutputParsers:
    """Makes the parsers of a model's outputs.

    Args:
        tokenizer: of the checkpoint; None: all is text.
        tool_call_parser, reasoning_parser: names, ``auto`` or ``none``.

    Attributes:
        tool_call_parser, reasoning_parser: the names that were found.

    Raises ConfigError for a name that there is not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        source = ""
        if tokenizer is not None and tokenizer.chat_template is not None:
            source = tokenizer.chat_template.source(with_tools=True)
        # Where a template takes no tools, they are told in Hermes' form.
        of_calls = _CALLS if tokenizer is not None and tokenizer.takes_tools else ()
        self.tool_call_parser = _named(tool_call_parser, source, of_calls, "hermes")
        self.reasoning_parser = _named(reasoning_parser, source, _REASONING, NONE)
        self._calls = _load(TOOL_CALL_PARSERS, self.tool_call_parser)
        self._reasoning = _load(REASONING_PARSERS, self.reasoning_parser)
        self._marks: frozenset[int] = frozenset()  # special tokens that no answer has
        if tokenizer is not None and self._reasoning is not None:
            inner = map(tokenizer.special_token_id, self._reasoning.inner_tokens)
            self._marks = tokenizer.special_token_ids.difference(inner)

    def shown_token_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Special tokens that must be in an output's text, for they are what is parsed."""
        kinds = (self._reasoning, self._calls if with_tools else None)
        names = [name for kind in kinds if kind is not None for name in kind.special_tokens]
        found = map(self._tokenizer.special_token_id, names) if self._tokenizer else ()
        return frozenset(token_id for token_id in found if token_id is not None)

    def prompt_end(self, prompt: list[int]) -> str:
        """Return what a prompt already has of the answer: a mark, or the beginning of a thought.

        The answer begins behind the last special token that is none of the parser's own. A prompt
        without one, apart from its first token, has a few tokens of the answer at most.
        """
        if self._reasoning is None or self._tokenizer is None:
            return ""
        start, first = len(prompt), max(len(prompt) - _MAX_PROMPT_END_TOKENS, 1)
        while start > first and prompt[start - 1] not in self._marks:
            start -= 1
        if start <= first:
            start = max(len(prompt) - _PROMPT_END_TOKENS, 0)
        return self._tokenizer.decode(prompt[start:], skip_special_tokens=False)

    def answer_or_calls(
        self, answer: str, functions: Sequence[Function], *, several: bool
    ) -> str | None:
        """Make the grammar of an answer that fits a JSON schema, or calls of functions.

        Returns None when no calls are looked for in outputs; raises what `answer_or_calls` does.
        """
        if self._calls is None:
            return None
        return answer_or_calls(
            self.tool_call_parser, answer, functions, self._mark, several=several
        )

    def _mark(self, text: str) -> str:
        token_id = self._tokenizer.special_token_id(text) if self._tokenizer else None
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def make(
        self,
        context: ParserContext,
        *,
        is_forced: bool = False,
        is_constrained: bool = False,
        is_either: bool = False,
    ) -> OutputParser:
        """Make a new parser, for one output.

        Args:
            is_forced: a grammar holds the output to one call.
            is_constrained: a grammar holds it to something: then it does not think before.
            is_either: the grammar is that of `answer_or_calls`.
        """
        if is_forced:
            return OneCall(new_call_id if self._calls is None else self._calls.make_id)
        calls = self._calls if context.tools else None
        reasoning = None if is_constrained else self._reasoning
        for kind in (reasoning, calls):
            if kind is not None and kind.takes_all:
                return kind(context)
        rest: OutputParser = PlainText() if calls is None else calls(context)
        if is_either and (mark := FORMS[self.tool_call_parser].begins):
            rest = CallsOrText(mark, rest)
        return rest if reasoning is None else ThinkFirst(reasoning(context), rest)


def _named(given: str, source: str, signs: tuple[tuple[str, str], ...], otherwise: str) -> str:
    if given != AUTO:
        return given
    return next((name for sign, name in signs if sign in source), otherwise)


def _load(registry: Registry[ParserKind], name: str) -> ParserKind | None:
    return None if name == NONE else registry.load(name)
