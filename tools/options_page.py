"""Writes docs/options.md: every option of every program, from their declarations.

python -m tools.options_page --write    write the page
python -m tools.options_page --check    fail if it is stale; `make check` runs this
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_args, get_origin

from baton.cli.config_file import PROGRAMS
from baton.cli.declared import by_name, help_of_option, is_several
from baton.cli.programs.entries import LOAD_TEST_ENTRIES, PROGRAM_ENTRIES
from baton.options import OF_ONE_PROCESS, Option

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """\
# Options

Written by `tools/options_page.py` from the declarations; do not edit. How options are given, in
which files and variables, and who wins: [settings](settings.md). `--max-model-len` is
`BATON_MAX_MODEL_LEN` in the environment and `max_model_len` in a file. *Own*: each process has its
own; a file says it in the program's table only. *Secret*: in no file, and never shown.
"""
_NODES = ("prefill", "decode")
_COMMANDS = {
    "loadtest-run": "loadtest run",
    "loadtest-compare": "loadtest compare",
    "loadtest-tune": "loadtest tune",
}


def page() -> str:
    """Return the text of docs/options.md."""
    options = {name: by_name(PROGRAMS.load(name)) for name in PROGRAMS.names()}
    prefill, decode = (options[name] for name in _NODES)
    both = {name for name in prefill if _row(prefill[name]) == _row(decode.get(name))}
    entries, parts = PROGRAM_ENTRIES | LOAD_TEST_ENTRIES, [HEAD]
    for name, own in options.items():
        if name == "prefill":
            shared = [prefill[one] for one in prefill if one in both]
            parts.append(
                _section("Both kinds of node", "Options of `prefill` and `decode`.", shared)
            )
        kept = [one for one in own.values() if name not in _NODES or one.name not in both]
        parts.append(_section(f"baton {_COMMANDS.get(name, name)}", entries[name].summary, kept))
    return "\n".join(parts)


def _section(title: str, summary: str, options: Iterable[Option]) -> str:
    rows = "\n".join(map(_row, options))
    return f"## {title}\n\n{summary}\n\n| option | default | |\n|---|---|---|\n{rows}\n"


def _row(option: Option | None) -> str:
    if option is None:
        return ""
    marks = "".join(
        f" *{mark}.*"
        for mark, is_so in (
            ("Own", option.name in OF_ONE_PROCESS),
            ("Secret", option.declaration.is_secret),
            ("May be repeated", is_several(option)),
        )
        if is_so
    )
    text = help_of_option(option).replace("|", "\\|").replace("<", "&lt;")
    flag = f"--{option.name.replace('_', '-')}"
    return f"| `{flag}` {_type(option.type)} | {_default(option)} | {text}{marks} |"


def _type(kind: Any) -> str:
    """Return the text for what an option accepts: the name of a type, or the allowed values."""
    values = getattr(kind, "__members__", None)
    if values:
        return ", ".join(one.value for one in values.values())
    kinds = [one for one in get_args(kind) if one not in (type(None), ...)] or [kind]
    names = {"str": "text", "int": "number", "float": "number", "bool": "yes or no"}
    return names[kinds[0].__name__] if get_origin(kind) is not dict else ""


def _default(option: Option) -> str:
    if option.default is MISSING:
        return "must be given"
    if option.default in (None, "", ()):
        return ""
    if isinstance(option.default, bool):
        return "yes" if option.default else "no"
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    return " ".join(f"`{getattr(one, 'value', one)}`" for one in values)


def main() -> int:
    """Check or write the page; return the exit code."""
    text = page()
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is old: run python -m tools.options_page --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
