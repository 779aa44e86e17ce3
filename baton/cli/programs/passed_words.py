"""PassedWords: the words after `baton up` that are no options of `baton up` itself.

These words are models, and options of the programs that `baton up` starts.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.config_file import PROGRAMS, flag_of
from baton.cli.declared import EXIT_USAGE, by_name
from baton.cli.errors import CommandError
from baton.options import OF_ONE_PROCESS, Option
from baton.version import __version__

_STARTED = ("router", "prefill", "decode", "encode")
_META = "baton.passed_words"


@dataclass(frozen=True, slots=True)
class PassedWords:
    """Models, and the arguments of each program that `baton up` starts.

    Attributes:
        models: model folders, GGUF files or hub ids.
        by_program: program -> its arguments.
    """

    models: tuple[str, ...]
    by_program: Mapping[str, Sequence[str]]


def passed_words_of(context: Any) -> PassedWords:
    """Return the words that `divide_words` divided in a context."""
    passed: PassedWords = context.meta[_META]
    return passed


def divide_words(context: Any, words: list[str] | None) -> list[str]:
    """Divide a command's words among models and programs; raises CommandError naming an option.

    The models become the default of `--model`. An option that several programs have is given to
    each of them.
    """
    models: list[str] = []
    by_program: dict[str, list[str]] = {program: [] for program in _STARTED}
    rest = iter(words or ())
    for word in rest:
        if not word.startswith("-"):
            models.append(word)
            continue
        programs = _programs_with(word)
        arguments = [word, *_value_after(word, programs[0], rest)]
        for program in programs:
            by_program[program] += arguments
    context.meta[_META] = PassedWords(tuple(models), by_program)
    if models:
        context.default_map = {**(context.default_map or {}), "model": models}
    return words or []


def _name_of(word: str) -> str:
    """Return the name of an option: max_model_len for --max-model-len=64."""
    return word.removeprefix("--").partition("=")[0].replace("-", "_")


def _programs_with(word: str) -> Sequence[str]:
    """Return the programs that get an option; raises CommandError if no program has the option."""
    if _name_of(word) in OF_ONE_PROCESS:
        raise CommandError(
            f"{word.partition('=')[0]}: differs for each program; give it in --router-args, "
            "--prefill-args, --decode-args or --encode-args",
            EXIT_USAGE,
        )
    found = [program for program in _STARTED if _option(word, program) is not None]
    if not found:
        raise CommandError(_unknown(word), EXIT_USAGE)
    return found


def _option(word: str, program: str) -> Option | None:
    """Return a program's option; --no-x is the option x, if the option is a switch."""
    options = by_name(PROGRAMS.load(program))
    name = _name_of(word)
    positive = options.get(name.removeprefix("no_"))
    return positive if _is_switch(positive) else options.get(name)


def _is_switch(option: Option | None) -> bool:
    """Return whether an option is yes or no, and so has no value on the command line."""
    return option is not None and bool in (option.type, *typing.get_args(option.type))


def _value_after(word: str, program: str, rest: Iterator[str]) -> list[str]:
    """Return the value of an option, taken from the words that follow; empty if there is none."""
    if "=" in word or _is_switch(_option(word, program)):
        return []
    value = next(rest, None)
    if value is None:
        raise CommandError(f"{word}: needs a value", EXIT_USAGE)
    return [value]


def _unknown(word: str) -> str:
    """Return the error for an option that neither `baton up` nor a program has."""
    flag = word.partition("=")[0]
    own = set(by_name(PROGRAMS.load("up")))
    others = {name for program in _STARTED for name in by_name(PROGRAMS.load(program))}
    flags = sorted(map(flag_of, own | (others - OF_ONE_PROCESS)))
    near = difflib.get_close_matches(flag, flags, 1)
    remedy = f"is it {near[0]}?" if near else "see baton up --help"
    return f"{flag}: baton up of Baton {__version__} has no such option; {remedy}"
