"""OutputParsers: makes parsers of a model's outputs; chat template or option chooses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.api.errors import InvalidRequestError
from baton.api.thinking import Thinking
from baton.registry import Registry
from baton.text.thoughts.marks import ThoughtFinder
from baton.text.tokenizer import Tokenizer
from router.intake.answers.call_forms import Function, answer_or_calls, common_call, forced_calls
from router.intake.answers.free_text import text_or_calls
from router.intake.parsers import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS
from router.intake.parsers.base import OutputParser, ParserContext, new_call_id
from router.intake.parsers.families import Family, Thoughts, family_of
from router.intake.parsers.plain import CallsOrText, FirstCall, OneCall, PlainText
from router.intake.parsers.think import ThinkFirst

Row = TypeVar("Row", Family, Thoughts)


@dataclass(frozen=True, slots=True)
class AskedThinking:
    """Request's choice about thinking before the answer.

    Attributes:
        is_off: whether the model must not think.
        must_think: whether the output must begin with a thought; if not, the model decides.
        budget_tokens: maximum number of tokens of the thought; None: no limit.
        goes_on: whether the output continues the text of the prompt's last message; then no thought
            begins.
    """

    is_off: bool = False
    must_think: bool = False
    budget_tokens: int | None = None
    goes_on: bool = False


class OutputParsers:
    """Makes the parsers of one model's outputs, and grammars for its calls.

    Args:
        tokenizer: the checkpoint's tokenizer; None: outputs are plain text.
        tool_call_parser, reasoning_parser: names of the parsers, ``auto`` or ``none``.

    Attributes:
        tool_call_parser, reasoning_parser: names of the chosen parsers.

    Raises ConfigError for an unknown name.
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
        # If a template does not support tools, Baton describes tools to the model in Hermes' form.
        takes_tools = tokenizer is not None and tokenizer.takes_tools
        if tool_call_parser == AUTO:
            rows = TOOL_CALL_PARSERS.load_all() if takes_tools else {}
            tool_call_parser = family_of(source, rows) or "hermes"
        if reasoning_parser == AUTO:
            reasoning_parser = family_of(source, REASONING_PARSERS.load_all()) or NONE
        self.tool_call_parser = tool_call_parser
        self.reasoning_parser = reasoning_parser
        self._calls = _load(TOOL_CALL_PARSERS, tool_call_parser)
        self._reasoning = _load(REASONING_PARSERS, reasoning_parser)
        self._thoughts: ThoughtFinder | None = None
        if tokenizer is not None and self._reasoning is not None:
            self._thoughts = ThoughtFinder(tokenizer, self._reasoning.marks)

    def shown_token_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Return the special tokens that the text of outputs must show for the parsers."""
        kinds = (self._reasoning, self._calls if with_tools else None)
        names = [name for kind in kinds if kind is not None for name in kind.special_tokens]
        found = map(self._tokenizer.special_token_id, names) if self._tokenizer else ()
        return frozenset(token_id for token_id in found if token_id is not None)

    def prompt_end(self, prompt: list[int]) -> str:
        """Return the end of a prompt that is already part of the answer.

        See `ThoughtFinder`.
        """
        return "" if self._thoughts is None else self._thoughts.prompt_end(prompt)

    def thinking(
        self,
        prompt: list[int],
        asked: AskedThinking,
        *,
        is_constrained: bool = False,
        before_calls: bool = False,
    ) -> Thinking | None:
        """Return the marks and budget of a thought; None if the engine need not know them.

        Args:
            is_constrained: whether a grammar constrains the answer after the thought.
            before_calls: whether this grammar is of calls in the family's form, not of an answer.
        """
        is_off = asked.is_off or asked.budget_tokens == 0
        budget_tokens = 0 if is_off else asked.budget_tokens
        if self._thoughts is None or (budget_tokens is None and not is_constrained):
            return None
        found = self._thoughts.thinking(
            prompt,
            budget_tokens=budget_tokens,
            must_open=asked.must_think and not is_off,
            before_calls=before_calls,
        )
        if found is None or found.is_open:
            return found
        lets_none_begin = asked.goes_on or (is_off and is_constrained)
        return None if lets_none_begin else found

    def asked_thinking(self, prompt: list[int], asked: Thinking) -> Thinking | None:
        """Add the model's marks to a request's settings of thinking; None if no thought can begin.

        Raises InvalidRequestError for a model that does not think.
        """
        if self._thoughts is None:
            raise InvalidRequestError("thinking", "this model has no marks of a thought")
        return self._thoughts.thinking(
            prompt, budget_tokens=asked.budget_tokens, must_open=asked.must_open
        )

    def answer_or_calls(
        self, answer: str, functions: Sequence[Function], *, several: bool
    ) -> str | None:
        """Make a grammar that allows either an answer that fits a JSON Schema, or calls.

        Returns None if outputs are not searched for calls. Raises the errors of the function
        `answer_or_calls`.
        """
        if self._calls is None:
            return None
        return answer_or_calls(self._calls.form, answer, functions, self._mark, several=several)

    def forced_calls(self, functions: Sequence[Function], *, several: bool) -> tuple[str, bool]:
        """Make a grammar that allows only calls, in the model's form or in a common JSON form.

        Returns also whether the calls have the common form; pass this to `make` as ``is_forced``.

        Raises InvalidRequestError.
        """
        if self._calls is None:
            return common_call(functions), True
        grammar, is_of_family = forced_calls(
            self._calls.form, functions, self._mark, several=several
        )
        return grammar, not is_of_family

    def text_or_calls(self, functions: Sequence[Function], *, several: bool) -> str | None:
        """Make a grammar of a text that may end in calls.

        Returns None if calls cannot be told from text. Raises InvalidRequestError.
        """
        if self._calls is None:
            return None
        return text_or_calls(self._calls.form, functions, self._mark, several=several)

    def _mark(self, text: str) -> str:
        token_id = self._tokenizer.mark_token_id(text) if self._tokenizer else None
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def make(
        self,
        context: ParserContext,
        *,
        is_forced: bool = False,
        is_constrained: bool = False,
        is_either: bool = False,
        thinks: bool = False,
        several: bool = True,
    ) -> OutputParser:
        """Make a new parser for one output.

        Args:
            is_forced: whether a grammar forces one call in the common form.
            is_constrained: whether a grammar constrains the answer; False if the grammar allows
                free text.
            is_either: whether this grammar comes from `answer_or_calls`.
            thinks: whether a thought may precede the constrained answer.
            several: whether a client may get more than one call.
        """
        reasoning = self._reasoning if thinks or not (is_forced or is_constrained) else None
        parser = self._make(context, reasoning, is_forced, is_either)
        return parser if several else FirstCall(parser)

    def _make(
        self, context: ParserContext, reasoning: Thoughts | None, is_forced: bool, is_either: bool
    ) -> OutputParser:
        if is_forced:
            call = OneCall(new_call_id if self._calls is None else self._calls.make_ids(context))
            return call if reasoning is None else ThinkFirst(reasoning(context), call)
        calls = self._calls if context.tools else None
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
