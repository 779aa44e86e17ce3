"""Options: each option is declared once, as a field of the frozen dataclass that it belongs to.

The declaration is in the field's metadata, so these classes stay plain dataclasses. The
declarations define the command line, ``BATON_*`` variables, configuration files, `baton config
show` and docs/options.md. Knows no command line and no file: see `baton/cli/declared.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from baton.api.errors import ConfigError

T = TypeVar("T")

# Options that differ for each process of a fleet. Their values are never read from the environment
# or the part of a file that several processes share.
OF_ONE_PROCESS = frozenset(
    {
        "name", "listen", "node_listen", "metrics_listen", "kv_listen", "reuse_port", "cpu_list",
        "tls_cert", "tls_key", "tls_ca", "tls_require_client_certs",
    }
)  # fmt: skip
# Largest number that an option accepts: no size, rate or count of a machine is larger.
LARGEST_NUMBER = 1e18
# Longest time in seconds that an option accepts.
LONGEST_S = 1e9
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_KEY = "baton.options"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """An option's declaration, except its field's name, type and default.

    Attributes:
        help: help text.
        name: name of the option; empty: the name of the field.
        least, above, most: limits of a number: smallest value, value that must be exceeded, largest
            value.
        choices: allowed values; empty: all values are allowed.
        unset: text that users give for the value None.
        parse: function that converts a user's text; its first argument is the option's name, for
            errors.
        variable: another environment variable that sets the option.
        is_secret: whether the value is never shown.
        has_own_variable: whether the environment variable ``BATON_`` and the option's name sets the
            option; False: this variable has another meaning.
        further: name of the field for all values after the first; empty: the option may be given
            only once.
    """

    help: str
    name: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    unset: Any = None
    parse: Callable[[str, str], Any] | None = None
    variable: str = ""
    is_secret: bool = False
    has_own_variable: bool = True
    further: str = ""

    def problem(self, value: Any) -> str:
        """Return what is wrong with a value; empty if it is valid."""
        is_wrong = (
            (self.least is not None and not value >= self.least)
            or (self.above is not None and not value > self.above)
            or (self.most is not None and not value <= self.most)
            or (self.choices and value not in self.choices)
        )
        if not is_wrong:
            is_number = isinstance(value, int | float)
            if is_number and not abs(value) <= LARGEST_NUMBER:  # false for NaN
                return f"must be a number up to {LARGEST_NUMBER:g}, got {value!r:.30}"
            return ""
        shown = f"{value:g}" if isinstance(value, float) else f"{value!r:.100}"
        limits = self.limits
        if self.least is not None and self.most is not None:
            limits = f"{self.most} or less" if value > self.most else f"{self.least} or more"
        return f"must be {limits}, got {shown}"

    @property
    def limits(self) -> str:
        """The allowed values in words; empty if all values of the type are allowed."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.above is not None and self.most is not None:
            return f"in ({self.above:g}, {self.most:g}]"
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        if self.above is not None:
            return f"above {self.above:g}"
        if self.least is not None:
            return f"{self.least} or more"
        return f"{self.most} or less" if self.most is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a program.

    Attributes:
        name: name of the option: ``max_model_len`` for ``--max-model-len``.
        type: type of the value that users give.
        default: default, in the form that users give; `dataclasses.MISSING`: the option is
            required.
        path: names of the fields that lead from the outermost dataclass to the option's value.
    """

    name: str
    type: Any
    default: Any
    path: tuple[str, ...]
    declaration: Declaration

    def read(self, value: Any) -> Any:
        """Convert a value that a user gave to the value of the field; raises ConfigError."""
        declaration = self.declaration
        if value is None or (declaration.unset is not None and value == declaration.unset):
            return None
        if declaration.parse is not None:
            return declaration.parse(self.name, value)
        return tuple(value) if isinstance(value, list) else value


def option(default: Any = dataclasses.MISSING, /, *, help: str, **more: Any) -> Any:
    """Declare a dataclass field as an option, which is required if it has no default.

    See `Declaration` for the arguments.
    """
    declaration = Declaration(help=help, **more)
    return field(default=default, repr=not declaration.is_secret, metadata={_KEY: declaration})


def group(make_default: Callable[[], Any], *, without: tuple[str, ...] = ()) -> Any:
    """Declare a dataclass field that holds another dataclass of options.

    The options of the inner class become options of the outer class.

    Args:
        make_default: returns the field's default, whose values are the options' defaults.
        without: options of the inner class that the outer class does not get.
    """
    return field(default_factory=make_default, metadata={_KEY: frozenset(without)})


def same_option(kind: type[Any], name: str) -> Any:
    """Declare a dataclass field as an option with the declaration of another dataclass's option.

    The value is passed on to the other dataclass, which converts the value and then checks the
    limits if its option has ``parse`` or ``unset``.
    """
    one = next(one for one in options_of(kind) if one.name == name)
    plain = dataclasses.replace(one.declaration, name="", unset=None, parse=None)
    if one.declaration.parse or one.declaration.unset is not None:
        plain = dataclasses.replace(plain, least=None, above=None, most=None)
    return field(default=one.default, metadata={_KEY: plain})


def has_options(kind: Any) -> bool:
    """Return whether a class is a dataclass with options."""
    return dataclasses.is_dataclass(kind) and any(
        _KEY in one.metadata for one in dataclasses.fields(kind)
    )


def options_of(kind: type[Any]) -> list[Option]:
    """Return all options of a dataclass and of its groups, in the order of their declarations."""
    return list(_options_of(kind, None, ()))


def _options_of(kind: type[Any], owner: Any, path: tuple[str, ...]) -> Iterator[Option]:
    """Yield the options of a class, with the values of ``owner`` as defaults if it is given."""
    types = get_type_hints(kind)
    for one in dataclasses.fields(kind):
        said = one.metadata.get(_KEY)
        if isinstance(said, Declaration):
            default = one.default if owner is None else getattr(owner, one.name)
            has_unset = said.unset is not None
            yield Option(
                name=said.name or one.name,
                type=type(said.unset) if has_unset else types[one.name],
                default=said.unset if has_unset and default is None else default,
                path=(*path, one.name),
                declaration=said,
            )
        elif said is not None:
            assert one.default_factory is not dataclasses.MISSING
            inner = one.default_factory() if owner is None else getattr(owner, one.name)
            for found in _options_of(type(inner), inner, (*path, one.name)):
                if found.name not in said:
                    yield found


def make(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass of options from users' values, given by option name; raises ConfigError."""
    given: dict[tuple[str, ...], Any] = {}
    for one in options_of(kind):
        if one.name not in values:
            continue
        value, further = values[one.name], one.declaration.further
        if further and isinstance(value, list):
            if not value:
                continue
            value, *others = value
            given[*one.path[:-1], further] = tuple(others)
        given[one.path] = one.read(value)
    return kind(**_fields(kind, None, given))


def _fields(kind: type[Any], owner: Any, given: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields; make a group anew if its options are given."""
    found: dict[str, Any] = {path[0]: value for path, value in given.items() if len(path) == 1}
    of_groups: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in given.items():
        if len(path) > 1:
            of_groups.setdefault(path[0], {})[path[1:]] = value
    defaults = {one.name: one.default_factory for one in dataclasses.fields(kind)}
    for name, values in of_groups.items():
        make_default: Any = defaults[name]
        inner = make_default() if owner is None else getattr(owner, name)
        found[name] = dataclasses.replace(inner, **_fields(type(inner), inner, values))
    return found


def check_limits(owner: Any) -> None:
    """Raise ConfigError for the first field whose value its declaration forbids."""
    for one in dataclasses.fields(owner):
        said, value = one.metadata.get(_KEY), getattr(owner, one.name)
        if not isinstance(said, Declaration) or value is None:
            continue
        name = said.name or one.name
        if why := said.problem(value):
            raise ConfigError(f"{name}: {why}")
        if one.name.endswith("_s") and isinstance(value, int | float) and value > LONGEST_S:
            raise ConfigError(f"{name}: must be {LONGEST_S:g} or less, got {value:g}")


def parse_bytes(name: str, text: str) -> int:
    """Parse a number of bytes such as ``512M``, ``2GiB`` or ``1000000``; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,18})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"{name}: must be a number of bytes such as 512M or 2G, got {text!r:.100}"
        )
    return int(match[1]) * _UNITS[match[2].upper()]
