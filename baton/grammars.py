"""Grammars: a StructuredOutput as the grammar library reads it, and whether it can be read.

The library is llguidance (docs/adr/0009): Rust, no torch. Its texts come from clients, so all that
is done with them has limits, and runs on threads that have the stack for deep recursion.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidRequestError
from baton.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

P = ParamSpec("P")
T = TypeVar("T")

# The library recurses, rule into rule, and a stack that overflows ends the process: a chain of as
# many rules as fit in the largest text took less than a tenth of this. Only what is used is real.
_STACK_BYTES = 512 * 2**20
# More rules make the conversion from GBNF slow; the grammar of SQL or of C has a few hundred.
MAX_RULES = 1000
_RULE = re.compile(r"^\s*[!?\w.-]+\s*(?:::=|:)", re.MULTILINE)
_MAX_PROBLEM_CHARS = 200
# As `json.dumps` writes. With free whitespace an output of bounded schema could go on for ever.
_JSON_DEFAULTS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def parser_limits() -> LLParserLimits:
    """What one grammar may cost: some tens of milliseconds a step, some tens of megabytes."""
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def make_grammar(structured_output: StructuredOutput) -> str:
    """What `LLMatcher` reads; raises InvalidRequestError."""
    text = structured_output.text
    match structured_output.kind:
        case "json_schema":
            return _json_grammar(text)
        case "json_object":
            return _json_grammar('{"type":"object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(text))
        case _:
            texts = (json.dumps(one, ensure_ascii=False) for one in structured_output.choice)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))


def check_structured_output(structured_output: StructuredOutput) -> None:
    """Raise InvalidRequestError if it is wrong in itself; run it on `GrammarThreads`.

    A compiler that knows the tokens may still refuse it, and what it means may cost too much.
    """
    with library_errors(structured_output):
        grammar = make_grammar(structured_output)
        problem = LLMatcher.validate_grammar(grammar, limits=parser_limits())
    if problem and not problem.startswith("WARNING"):
        raise invalid_grammar(structured_output, problem)


@contextmanager
def library_errors(structured_output: StructuredOutput) -> Iterator[None]:
    """What the library raises inside becomes InvalidRequestError."""
    try:
        yield
    except InvalidRequestError:
        raise
    except BaseException as error:  # a panic in Rust is no Exception; no signal comes here
        raise invalid_grammar(structured_output, str(error) or type(error).__name__) from None


def invalid_grammar(structured_output: StructuredOutput, problem: str) -> InvalidRequestError:
    """The library's message as one line of ours."""
    if problem.startswith("NoExtensionBias"):
        problem = "no output can match it"
    lines = " ".join(problem.replace("<non-verbose/>", "").split())
    if len(lines) > _MAX_PROBLEM_CHARS:
        # The offending text is quoted first, what is wrong with it comes last.
        lines = f"{lines[: _MAX_PROBLEM_CHARS // 2]} ... {lines[-_MAX_PROBLEM_CHARS // 2 :]}"
    return InvalidRequestError(f"structured_output.{structured_output.kind}", lines)


class GrammarThreads:
    """Threads for what reads clients' grammars; the library lets go of the GIL.

    Args:
        num_threads: how many grammars are read at the same time.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call on one of the threads."""
        before = threading.stack_size(_STACK_BYTES)  # of threads that begin from now on
        try:
            return self._pool.submit(call, *args, **kwargs)
        finally:
            threading.stack_size(before)


def _json_grammar(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema, defaults=_JSON_DEFAULTS, overrides={"lenient": False}
    )


def _lark(text: str) -> str:
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise InvalidRequestError(
            "structured_output.grammar", f"must have at most {MAX_RULES} rules, got {num_rules}"
        )
    return any_to_lark(text)
