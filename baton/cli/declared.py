"""Make command-line options from the declarations in dataclasses (`baton/options.py`).

If the type of a command's parameter is a dataclass of options, the parameter is replaced by these
options.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from baton.api.errors import ConfigError
from baton.cli.errors import CommandError
from baton.options import Option, has_options, make, options_of
from baton.processes.child_processes import ENVIRONMENT_PREFIX

EXIT_USAGE = 2


def with_declared_options(
    command: Callable[..., Any], *more: inspect.Parameter
) -> Callable[..., Any]:
    """Replace each parameter of a command that is a dataclass of options by these options.

    The new command's attribute ``declared`` holds the options by name.

    Args:
        more: further options of the command, which are not declared in a dataclass.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    kinds = {
        name: one.annotation for name, one in parameters.items() if has_options(one.annotation)
    }
    if not kinds:
        return command
    declared = {name: by_name(kind) for name, kind in kinds.items()}

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        for one in more:
            values.pop(one.name, None)
        for name, kind in kinds.items():
            given = {option: values.pop(option) for option in declared[name]}
            values[name] = make_or_refuse(kind, given)
        return command(**values)

    taken: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        own = declared.get(name)
        taken += [_parameter(one) for one in own.values()] if own else [parameter]
    ordered = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in [*taken, *more]]
    made: Any = wrapped
    made.__signature__ = inspect.Signature(ordered)
    made.__annotations__ = {one.name: one.annotation for one in ordered}
    made.declared = {one.name: one for own in declared.values() for one in own.values()}
    del made.__wrapped__  # so that Typer does not read the parameters of `command`
    return wrapped


def make_or_refuse(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Make a dataclass of options from users' values; raises CommandError for invalid values."""
    declared = by_name(kind)
    given = {name: _undivided(declared[name], value) for name, value in values.items()}
    try:
        return make(kind, given)
    except ConfigError as error:
        raise CommandError(str(error), EXIT_USAGE) from None


def _undivided(option: Option, value: Any) -> Any:
    """Return the values of an option that may be repeated.

    In an environment variable, values are separated by commas, because Typer's own separator, a
    space, may occur in paths.
    """
    if not (option.declaration.further and isinstance(value, list)):
        return value
    text = os.environ.get(f"{ENVIRONMENT_PREFIX}_{option.name.upper()}", "")
    return text.split(",") if value and value == text.split() else value


def by_name(kind: type[Any]) -> dict[str, Option]:
    """Return the options of a dataclass by name."""
    return {one.name: one for one in options_of(kind)}


def help_of_option(option: Option) -> str:
    """Return the help text of an option with its limits, but without the limit "0 or more"."""
    said, limits = option.declaration.help, option.declaration.limits
    return said if limits in ("", "0 or more") else f"{said} Must be {limits}."


def is_several(option: Option) -> bool:
    """Return whether an option may be repeated."""
    return bool(option.declaration.further) or typing.get_origin(option.type) is tuple


def _completer(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the function by which a shell completes an option's values, which are ``choices``."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _parameter(option: Option) -> inspect.Parameter:
    """Return the parameter of a Typer command for an option."""
    kind, default = option.type, option.default
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    elif option.declaration.further:
        default = [default] if default else []
    elif is_several(option):
        default = list(default)
    if is_several(option):
        kind = list[str]
    choices = option.declaration.choices
    settings = typer.Option(
        help=help_of_option(option),
        envvar=option.declaration.variable or None,
        allow_from_autoenv=option.declaration.has_own_variable,
        autocompletion=_completer(choices) if choices else None,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, settings],
    )
