"""Grammars: convert a StructuredOutput to the grammar library's form, and compile it.

The library is llguidance (docs/adr/0009): Rust, no torch. Clients write the grammars, and only
compiling shows their cost. So a grammar is first compiled in a process that can be killed
(`baton/text/grammar_trials.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.text.schemas.repairs import enforceable_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Maximum number of rules, because many rules make the conversion from GBNF slow. Grammars of SQL or
# C have a few hundred.
MAX_RULES = 1000
# Patterns have possessive quantifiers, so that matching takes linear time even for texts of blanks
# or a single long name.
_RULE = re.compile(r"^[^\S\n]*+[!?\w.-]++\s*+(?:::=|:)", re.MULTILINE)
_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
_MAX_PROBLEM_CHARS = 200
# Only the white space of `json.dumps` is allowed, because with any white space an output could go
# on for ever.
_JSON_DEFAULTS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def parser_limits() -> LLParserLimits:
    """Return the library's limits for the cost of an output token: some milliseconds and megabytes.

    These limits do not apply to compiling.
    """
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def make_grammar(structured_output: StructuredOutput) -> str:
    """Return the grammar in the form of the library's `LLMatcher`; raises InvalidRequestError."""
    text = structured_output.text
    match structured_output.kind:
        case "json_schema":
            return _json_grammar(enforceable_schema(text))
        case "json_object":
            return _json_grammar('{"type":"object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(text))
        case _:
            texts = (json.dumps(one, ensure_ascii=False) for one in structured_output.choice)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))


def load_grammar_tokenizer(path: Path, eos_token_ids: Iterable[int] = ()) -> LLTokenizer:
    """Load a checkpoint's tokenizer in the grammar library's form; raises InvalidRequestError.

    Holds the GIL all the time, which takes seconds for a vocabulary of 262,144 tokens.

    Args:
        path: path of the checkpoint's ``tokenizer.json``.
        eos_token_ids: ids of the tokens that may end an output; empty: the tokenizer's own.
    """
    if not path.is_file():
        raise InvalidRequestError("structured_output", "this checkpoint has no tokenizer.json")
    ends = sorted(eos_token_ids)
    try:
        try:
            return LLTokenizer(str(path), eos_token=ends or None)
        except ValueError:
            if not ends:
                raise
            # If the model names end tokens that the tokenizer lacks, load again without these
            # tokens.
            tokenizer = LLTokenizer(str(path))
            known = [token_id for token_id in ends if token_id < tokenizer.vocab_size]
            return LLTokenizer(str(path), eos_token=known) if known else tokenizer
    except Exception as error:  # the library raises no more specific class
        problem = f"this checkpoint's tokenizer.json cannot be used: {one_line(str(error))}"
        raise InvalidRequestError("structured_output", problem) from None


def compile_grammar(
    structured_output: StructuredOutput, grammar: str, tokenizer: LLTokenizer
) -> LLMatcher:
    """Compile a grammar from `make_grammar`; raises InvalidRequestError."""
    with library_errors(structured_output):
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        problem = _problem_at_start(matcher)
    if problem:
        raise invalid_grammar(structured_output, problem)
    return matcher


@contextmanager
def library_errors(structured_output: StructuredOutput) -> Iterator[None]:
    """Convert all errors that the library raises within the context to InvalidRequestError."""
    try:
        yield
    except InvalidRequestError:
        raise
    # Every BaseException is caught, because the library's Rust panics do not derive from Exception.
    except BaseException as error:
        raise invalid_grammar(structured_output, str(error) or type(error).__name__) from None


def invalid_grammar(structured_output: StructuredOutput, problem: str) -> InvalidRequestError:
    """Return an InvalidRequestError with the library's message, shortened to one line."""
    if problem.startswith("NoExtensionBias"):
        problem = "no output can match it"
    lines = " ".join(problem.replace("<non-verbose/>", "").split())
    if len(lines) > _MAX_PROBLEM_CHARS:
        # A message begins with the wrong text and ends with the problem, so both ends are kept.
        lines = f"{lines[: _MAX_PROBLEM_CHARS // 2]} ... {lines[-_MAX_PROBLEM_CHARS // 2 :]}"
    return InvalidRequestError(f"structured_output.{structured_output.kind}", lines)


def one_line(text: str) -> str:
    """Join the lines of a library message, and shorten the result."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MAX_PROBLEM_CHARS]


def _problem_at_start(matcher: LLMatcher) -> str:
    """Return why a grammar allows no output or exceeds a limit at its start; empty if neither.

    Computes the masks of the first tokens, which cost most and are most likely to exceed a limit.
    """
    first = matcher.compute_bitmask()
    if not matcher.is_error() and not any(first):
        return "no output of this model can match it"
    ahead = matcher.deep_copy()
    if (allowed := _first_of(first)) is not None and ahead.consume_token(allowed):
        ahead.compute_bitmask()
    return ahead.get_error()


def _first_of(bits: bytes) -> int | None:
    """Return the index of the lowest set bit in a mask, or None if no bit is set."""
    for index, byte in enumerate(bits):
        if byte:
            return index * 8 + (byte & -byte).bit_length() - 1
    return None


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
    return text if _LARK.search(text) else gbnf_to_lark(text)
