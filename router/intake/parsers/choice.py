"""OutputParsers: which parsers a model's outputs go through, by its chat template or as told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from baton.registry import Registry
from baton.text.tokenizer import Tokenizer
from router.intake.answers.call_forms import Function, answer_or_calls, common_call, forced_calls
from router.intake.answers.free_text import text_or_calls
from router.intake.parsers import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS
from router.intake.parsers.base import OutputParser, ParserContext, new_call_id
from router.intake.parsers.families import CALLS, THOUGHTS, Family, Thoughts, family_of
from router.intake.parsers.plain import CallsOrText, FirstCall, OneCall, PlainText
from router.intake.parsers.think import ThinkFirst

Row = TypeVar("Row", Family, Thoughts)
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
        takes_tools = tokenizer is not None and tokenizer.takes_tools
        if tool_call_parser == AUTO:
            tool_call_parser = family_of(source, CALLS if takes_tools else {}) or "hermes"
        if reasoning_parser == AUTO:
            reasoning_parser = family_of(source, THOUGHTS) or NONE
        self.tool_call_parser = tool_call_parser
        self.reasoning_parser = reasoning_parser
        self._calls = _load(TOOL_CALL_PARSERS, tool_call_parser)
        self._reasoning = _load(REASONING_PARSERS, reasoning_parser)
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
        return answer_or_calls(self._calls.form, answer, functions, self._mark, several=several)

    def forced_calls(self, functions: Sequence[Function], *, several: bool) -> tuple[str, bool]:
        """Make the grammar of calls of functions; raises InvalidRequestError.

        Returns the grammar, and whether `make` is to make a parser of one common call.
        """
        if self._calls is None:
            return common_call(functions), True
        grammar, is_of_family = forced_calls(
            self._calls.form, functions, self._mark, several=several
        )
        return grammar, not is_of_family

    def text_or_calls(self, functions: Sequence[Function], *, several: bool) -> str | None:
        """Make the grammar of a text that may end in calls of functions.

        Returns None when calls in outputs cannot be told from texts; raises InvalidRequestError.
        """
        if self._calls is None:
            return None
        marks = self._reasoning.inner_tokens if self._reasoning is not None else ()
        thoughts = [mark for mark in marks if self._mark(mark) != json.dumps(mark)]
        return text_or_calls(self._calls.form, functions, self._mark, thoughts, several=several)

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
        several: bool = True,
    ) -> OutputParser:
        """Make a new parser, for one output.

        Args:
            is_forced: a grammar holds the output to one call in the common form.
            is_constrained: a grammar holds it to something: then it does not think before.
            is_either: the grammar is that of `answer_or_calls`.
            several: False: the output may have one call, and a client sees no other.
        """
        parser = self._make(context, is_forced, is_constrained, is_either)
        return parser if several else FirstCall(parser)

    def _make(
        self, context: ParserContext, is_forced: bool, is_constrained: bool, is_either: bool
    ) -> OutputParser:
        if is_forced:
            return OneCall(new_call_id if self._calls is None else self._calls.make_ids(context))
        calls = self._calls if context.tools else None
        reasoning = None if is_constrained else self._reasoning
        if reasoning is not None and reasoning.takes_all:
            return reasoning(context)
        if calls is not None and calls.takes_all:
            return calls(context)
        rest: OutputParser = PlainText() if calls is None else calls(context)
        if is_either and self._calls is not None and self._calls.form.begins:
            rest = CallsOrText(self._calls.form.begins, rest)
        return rest if reasoning is None else ThinkFirst(reasoning(context), rest)


def _load(registry: Registry[Row], name: str) -> Row | None:
    return None if name == NONE else registry.load(name)
