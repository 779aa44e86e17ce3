"""Configuration files: TOML with the options of all programs of a fleet.

Entries above all tables apply to every program that has the option. Entries in tables such as
`[router]` and `[decode]` apply to one program, and override the entries above all tables.
Environment variables override files, and the command line overrides both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from baton.api.bounded_files import parse_toml, read_text
from baton.api.errors import ConfigError
from baton.cli.declared import EXIT_USAGE, with_declared_options
from baton.cli.errors import CommandError
from baton.options import OF_ONE_PROCESS, Option, options_of
from baton.processes.child_processes import ENVIRONMENT_PREFIX
from baton.registry import Registry
from baton.wrong_values import field_and_problem

# Command -> dataclass with the command's options, for programs that read a configuration file.
PROGRAMS: Registry[type[Any]] = Registry(
    "program",
    {
        "up": "baton.cli.programs.up:UpOptions",
        "router": "router.config:RouterConfig",
        "prefill": "prefill_node.options:PrefillOptions",
        "decode": "decode_node.options:DecodeNodeOptions",
        "encode": "encode_node.options:EncodeOptions",
        "sim-node": "sim_node.options:SimNodeOptions",
        "loadtest-run": "loadtest.options:RunOptions",
        "loadtest-compare": "loadtest.options:CompareOptions",
        "loadtest-tune": "loadtest.options:TuneOptions",
    },
)
# Load tests measure a fleet from outside, so entries for the whole fleet do not apply to them.
_NOT_OF_A_FLEET = ("loadtest-run", "loadtest-compare", "loadtest-tune")
CONFIG = "config"
_META = "baton.config_file"


@dataclass(frozen=True, slots=True)
class Given:
    """The value of an option in a configuration file.

    Attributes:
        value: value of the option, converted to its type.
        place: file, table and key of the value, for messages.
        is_own: whether the value is in the program's own table, not above all tables.
    """

    value: Any
    place: str
    is_own: bool


def program(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command that is one of `PROGRAMS` also read options from a configuration file."""
    settings = typer.Option(
        help="TOML file of options, named like their variables: max_model_len = 4096. Entries "
        "above all tables: for all programs; entries in [router], [prefill] and so on: for that "
        "program.",
        callback=_take_file,
        is_eager=True,
        expose_value=False,
    )
    parameter = inspect.Parameter(
        CONFIG,
        inspect.Parameter.KEYWORD_ONLY,
        default="",
        annotation=Annotated[str, settings],
    )
    return with_declared_options(command, parameter)


def _take_file(context: typer.Context, value: str) -> str:
    if value and not context.resilient_parsing:
        declared: Mapping[str, Option] = getattr(context.command.callback, "declared", {})
        path = Path(value)
        given = read_config_file(path, _name_of(context), declared)
        context.meta[_META] = path, given
        values = {name: one.value for name, one in given.items()}
        context.default_map = {**values, **(context.default_map or {})}
    return value


def _name_of(context: Any) -> str:
    """Return the command's name in `PROGRAMS`; for a command of a group, both words joined."""
    own: str = context.info_name or ""
    return own if own in PROGRAMS.names() else f"{context.parent.info_name}-{own}"


def file_of(context: Any) -> Path | None:
    """Return the configuration file that a command was given, or None."""
    path: Path | None = context.meta.get(_META, (None, {}))[0]
    return path


def passed_on(context: Any, names: Iterable[str]) -> list[str]:
    """Return the options that a child program must get as arguments.

    These are the options of the command line, and the options in this command's table of the file
    that no other source overrides. The child reads the environment and the file's other entries
    itself.

    Args:
        names: names of the options to pass on.
    """
    _, given = context.meta.get(_META, (None, {}))
    found: list[str] = []
    for name in names:
        place = place_of(context, name)
        is_own = name in given and given[name].is_own and place == given[name].place
        if is_own or place == flag_of(name):
            value = context.params[name]
            for one in value if isinstance(value, list | tuple) else [value]:
                found += [flag_of(name), str(one)]
    return found


def read_config_file(
    path: Path, program_name: str, declared: Mapping[str, Option]
) -> dict[str, Given]:
    """Return the values that a configuration file has for a program's options, by option name.

    Raises:
        CommandError: the file is unreadable, or has unknown names or wrong types.
    """
    try:
        content = parse_toml(read_text(path))
        found = {}
        for name, value in content.items():
            if isinstance(value, dict):
                if name not in PROGRAMS.names():
                    raise ConfigError(f"[{name}]: must be one of {', '.join(PROGRAMS.names())}")
            elif _is_for_all(name, declared) and program_name not in _NOT_OF_A_FLEET:
                found[name] = _check(f"{path}: {name}", value, declared[name], is_own=False)
        for name, value in content.get(program_name, {}).items():
            key = f"[{program_name}] {name}"
            if name not in declared:
                raise ConfigError(f"{key}: `baton {program_name}` has no such option")
            found[name] = _check(f"{path}: {key}", value, declared[name], is_own=True)
    except OSError as error:
        raise CommandError(f"{path}: cannot be read ({error.strerror})", EXIT_USAGE) from None
    except ValueError as error:  # includes ConfigError
        raise CommandError(f"{path}: {error}", EXIT_USAGE) from None
    return found


def _is_for_all(name: str, declared: Mapping[str, Option]) -> bool:
    """Return whether a key above all tables is an option of this program."""
    # names of programs are names of tables
    if name in OF_ONE_PROCESS or name in PROGRAMS.names():
        raise ConfigError(f"{name}: each program has its own; put it in a table such as [router]")
    if name in declared:
        return True
    others = (one.name for known in PROGRAMS.names() for one in options_of(PROGRAMS.load(known)))
    if name not in others:
        raise ConfigError(f"{name}: no program has such an option")
    return False


def _check(place: str, value: Any, option: Option, *, is_own: bool) -> Given:
    if option.declaration.is_secret:
        variable = variable_of(option.name)
        raise CommandError(f"{place}: is a secret; give it as {variable}", EXIT_USAGE)
    try:
        if option.declaration.further:  # the option accepts a list of values
            value = [value] if isinstance(value, str) else value
            return Given(msgspec.convert(value, list[str]), place, is_own)
        return Given(msgspec.convert(value, option.type), place, is_own)
    except msgspec.ValidationError as error:
        _, problem = field_and_problem(error, option.type)
        raise CommandError(f"{place}: {problem}", EXIT_USAGE) from None


def flag_of(name: str) -> str:
    """Return the flag of an option, such as ``--max-model-len``."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """Return the environment variable of an option, such as ``BATON_MAX_MODEL_LEN``."""
    return f"{ENVIRONMENT_PREFIX}_{name.upper()}"


def place_of(context: Any, name: str) -> str:
    """Return where an option's value was given; empty if it is the default."""
    source = context.get_parameter_source(name)
    kind = source.name if source is not None else ""
    if kind == "COMMANDLINE":
        return flag_of(name)
    if kind == "ENVIRONMENT":
        return variable_of(name)
    _, given = context.meta.get(_META, (None, {}))
    return given[name].place if kind == "DEFAULT_MAP" and name in given else ""
