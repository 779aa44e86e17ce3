"""Makes command-line options from a function's signature and docstring.

    def run(run: Run, requests: int = 20, parts: Sequence[str] = PARTS, other: Path | None = None)

gives `--requests N`, `--parts A B` (or `A,B`) and `--other PATH`. A `Literal` lists the allowed
values. The lines of the docstring's `Args:` section are the help texts. `run(run, options)` with a
dataclass gets an option per field, with help texts from the `Attributes:` section.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin

_ARGUMENT = re.compile(r"^        (\w+): (.+(?:\n            .+)*)", re.MULTILINE)


def add_options(parser: argparse.ArgumentParser, function: Callable[..., object]) -> None:
    """Add an option to the parser for each parameter of the function after the first."""
    declared = _declared(function)
    section = "    Args:\n" if declared is function else "    Attributes:\n"
    texts = dict(_ARGUMENT.findall((declared.__doc__ or "").partition(section)[2]))
    for parameter in _parameters(function):
        text = re.sub(r"\s+", " ", texts.get(parameter.name, "")).replace("%", "%%")
        flag = f"--{parameter.name.replace('_', '-')}"
        if isinstance(parameter.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
            continue
        kind, choices, is_list = _kind_of(parameter.annotation)
        parser.add_argument(
            flag,
            type=_list_of(kind, choices) if is_list else kind,
            choices=None if is_list else choices,
            nargs="*" if is_list else None,
            default=parameter.default,
            help=text,
        )


def values_of(function: Callable[..., object], found: argparse.Namespace) -> dict[str, Any]:
    """Return the function's keyword arguments, from the parsed command line."""
    declared = _declared(function)
    values = {parameter.name: getattr(found, parameter.name) for parameter in _parameters(function)}
    for parameter in _parameters(function):
        if _kind_of(parameter.annotation)[2] and values[parameter.name] is not parameter.default:
            values[parameter.name] = [one for some in values[parameter.name] for one in some]
    return values if declared is function else {"options": declared(**values)}


def _declared(function: Callable[..., object]) -> Callable[..., object]:
    """Return the object that declares the options: the function, or its parameter's dataclass."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    if len(parameters) == 1 and dataclasses.is_dataclass(kind := parameters[0].annotation):
        return cast("Callable[..., object]", kind)
    return function


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    declared = _declared(function)
    parameters = list(inspect.signature(declared, eval_str=True).parameters.values())
    return parameters[1:] if declared is function else parameters


def _kind_of(annotation: Any) -> tuple[Callable[[str], Any], Sequence[Any] | None, bool]:
    """Return how to parse an option's word, its allowed values, and whether it takes several."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):  # X | None
        return _kind_of(parts[0])
    if origin is Literal:
        return type(parts[0]), parts, False
    if isinstance(origin, type) and issubclass(origin, Sequence):
        kind, choices, _ = _kind_of(parts[0])
        return kind, choices, True
    return annotation, None, False


def _list_of(
    kind: Callable[[str], Any], choices: Sequence[Any] | None
) -> Callable[[str], list[Any]]:
    def read(word: str) -> list[Any]:
        values = [kind(part) for part in word.split(",") if part]
        for value in values:
            if choices is not None and value not in choices:
                raise argparse.ArgumentTypeError(f"must be one of {choices}, got {value!r}")
        return values

    return read
