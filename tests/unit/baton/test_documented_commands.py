"""Check that `baton` takes the options of every command in code blocks of README.md and docs/.

Starts nothing: each command's own parser reads the words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from baton.cli.app import app
from baton.cli.programs.passed_words import passed_words_of

REPOSITORY = Path(__file__).parents[3]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ROOT: Any = typer.main.get_command(app)
_BLOCK = re.compile(r"^ *```(bash|sh|shell|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_ENDS_A_COMMAND = ("|", ">", "2>", "&", "&&", "||", ";")
_STANDS_FOR_MORE = ("...", "$options")  # stand for options that a program must have
# Options of `baton up` whose text another program parses.
_PASSED_ON = {
    "router_args": ("router",),
    "node_args": ("prefill", "decode"),
    "prefill_args": ("prefill",),
    "decode_args": ("decode",),
}


def commands() -> Iterator[Any]:
    """Yield each command's words after `baton`."""
    for page in PAGES:
        for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                is_output = language == "console" and not line.startswith("$ ")
                if words := [] if is_output else _words_of(line.removeprefix("$ ")):
                    yield pytest.param(words, id=f"{page.name}: {' '.join(words)[:80]}")


def _words_of(line: str) -> list[str]:
    """Return the words after `baton` or `python -m baton`; none if a line calls neither."""
    if not re.search(r"\bbaton\s", f"{line} ") or line.lstrip().startswith("#"):
        return []
    words = shlex.split(line, comments=True)
    names = [Path(word).name for word in words]
    for place, name in enumerate(names):
        is_module = name == "baton" and names[max(place - 1, 0)] == "-m"
        begins = place == 0 or names[place - 1] in ("&&", ";", "--no-python", "do")
        is_assigned = place > 0 and all("=" in word for word in words[:place])
        if name == "baton" and (is_module or begins or is_assigned):
            return _until_the_end(words[place + 1 :])
    return []


def _until_the_end(words: list[str]) -> list[str]:
    for place, word in enumerate(words):
        if word in _ENDS_A_COMMAND:
            words = words[:place]
            break
    left_out = ["--model", "MODEL"] if any(word in _STANDS_FOR_MORE for word in words) else []
    return [word.rstrip(";") for word in words if word not in _STANDS_FOR_MORE] + left_out


def by_program_of(context: Any) -> Mapping[str, Sequence[str]]:
    """Return the arguments that `baton up` passes on to each program; empty for other commands."""
    return passed_words_of(context).by_program if context.info_name == "up" else {}


def parse(words: list[str]) -> None:
    """Raise a usage error if a command does not take the words."""
    command, parent, name = ROOT, None, "baton"
    while hasattr(command, "resolve_command"):  # a group of commands
        with command.make_context(name, words, parent=parent) as parent:
            words = [*getattr(parent, "_protected_args", ()), *parent.args]
            name, command, words = command.resolve_command(parent, words)
    with command.make_context(name, words, parent=parent) as context:
        for program, arguments in by_program_of(context).items():
            if arguments:
                parse([program, "--model", "MODEL", *arguments])
        for option, programs in _PASSED_ON.items():
            given = context.params.get(option)
            for program in programs if given else ():
                parse([program, "--model", "MODEL", *str(given).split()])


FOUND = list(commands())


def test_commands_are_found() -> None:
    assert len(FOUND) > 40


@pytest.mark.parametrize(
    "words", ["up M --unknown", "up M --node-args --unknown", "router --unknown"]
)
def test_an_option_that_nobody_has_is_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((typer.Exit, typer.BadParameter)) as refused:
        parse(words.split())
    said = f"{refused.value}{capsys.readouterr().err}"
    assert "--unknown: baton" in said
    assert "has no such option" in said


@pytest.mark.parametrize("words", FOUND)
def test_the_program_takes_the_options(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--config" in words:  # a command before it writes this file
        Path(words[words.index("--config") + 1]).touch()
    parse(words)
