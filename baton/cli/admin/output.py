"""Output of admin commands: tables for people, JSON with raw units for programs.

Modules that print are imported late, because `--help` must be fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import typer

from baton.api.printable import printable
from baton.cli.admin.connection import OutputFormat

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

_ENOUGH = 1000  # console columns; wide enough for all tables
_BLOCKS = " ▏▎▍▌▋▊▉█"


def make_console() -> Console:
    """Return a console for printing; if there is no terminal, it is wide enough for all tables."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def make_table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """Return an empty table whose last column has room for long values.

    Args:
        right: right-aligned columns, for numbers.
        whole: columns whose values are not wrapped, so that they can be copied.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole)
    return table


def fits(console: Console, table: Table, *, breaks_lines: bool = True) -> bool:
    """Return whether a table fits a console without breaking words.

    Args:
        breaks_lines: whether values with several words may take several lines.
    """
    found = console.measure(table, options=console.options.update(max_width=_ENOUGH))
    if not breaks_lines:
        return found.maximum <= console.width
    return found.minimum + len(table.columns) <= console.width


def print_first_that_fits(console: Console, *tables: Table, breaks_lines: bool = True) -> None:
    """Print the first of several tables that fits the console, or else the last table.

    Args:
        breaks_lines: whether values with several words may take several lines.
    """
    fitting = (one for one in tables[:-1] if fits(console, one, breaks_lines=breaks_lines))
    console.print(next(fitting, tables[-1]))


def make_grid() -> Table:
    """Return an empty table without a header."""
    from rich.table import Table

    return Table.grid(padding=(0, 2))


def escape(text: str) -> str:
    """Escape untrusted text, so that it is shown literally."""
    from rich.markup import escape as escape_markup

    return escape_markup(printable(text))


def print_json(value: Message | Mapping[str, Any]) -> None:
    """Print a message as JSON, with the field names and units of the proto files."""
    plain = value if isinstance(value, Mapping) else to_plain(value)
    typer.echo(json.dumps(plain, indent=2, allow_nan=False))


def show(found: Message, output: OutputFormat, print_found: Callable[[Any], object]) -> None:
    """Print an answer as JSON, or for people by ``print_found``."""
    if is_json(output):
        print_json(found)
    else:
        print_found(found)


def is_json(output: OutputFormat) -> bool:
    return output is OutputFormat.JSON


def to_plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values with all fields; absent messages are null.

    (`json_format` would write 64-bit numbers as strings, for JavaScript.)
    """
    return {field.name: _field_to_plain(message, field) for field in message.DESCRIPTOR.fields}


def _field_to_plain(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [_value_to_plain(field, one) for one in value]
    return _value_to_plain(field, value)


def _value_to_plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return to_plain(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type.values_by_number[value].name)
    return value if not isinstance(value, float) or math.isfinite(value) else None


def enum_field(message: Message, name: str) -> str:
    """Return the value of a message's enum field in one word, such as ``prefill``."""
    of_field: Any = message.DESCRIPTOR.fields_by_name[name]
    return enum_word(of_field.enum_type.values_by_number[getattr(message, name)].name)


def enum_word(name: str) -> str:
    """Return an enum member's name without its first two words: prefill for NODE_ROLE_PREFILL."""
    word = name.split("_", 2)[-1].lower()
    return "serving" if name == "SERVING_STATE_UNSPECIFIED" else word


# ------------------------------------------------------------------ values for people


def format_seconds(seconds: float) -> str:
    """Format a duration: ``840 us``, ``12.3 ms``, ``4.56 s``, ``2 min 5 s``, ``3 h 4 min``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s" if rest_s else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_count(number: float) -> str:
    """Format a number: ``0.32``, ``843``, ``12.3k``, ``4.56M``."""
    if not float(number).is_integer() and abs(number) < 9.95:
        return f"{number:.2g}"
    for unit in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def format_number(number: float, digits: int = 3) -> str:
    """Format a number without an exponent: ``0.0456``, ``12.3``, ``51,800``."""
    if abs(number) < 10**digits - 0.5:
        return f"{number:.{digits}g}"
    return f"{number:,.0f}"


def format_time(unix_s: float) -> str:
    """Format a time of this machine's clock: ``14:03:59.123``."""
    return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S.%f")[:-3]


def format_bar(share: float, width: int = 8) -> str:
    """Draw a bar: ``███▌····  44%``."""
    share = min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (_BLOCKS[part] if part else "")
    return f"{bar:·<{width}} {share * 100:3.0f}%"
