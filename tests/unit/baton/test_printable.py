"""Test text from models and servers on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from baton.api.printable import on_terminal
from baton.cli.client_commands import _print_text
from baton.processes.process import print_error

# A title, a cleared screen, a written clipboard, C1, DEL, a bell, a hidden line, reversed text.
HARMFUL = "\x1b]0;x\x07 \x1b[2J \x1b]52;c;eA==\x07 \x9b31m \x7f \b \r \u202e \u2066 \u2028"
HARMLESS = "def größer():\n\treturn '👩‍🚀' # 日本\u00a0語 \u200cمی‌خواهم"


class _Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_a_terminal_is_not_controlled() -> None:
    shown = on_terminal(HARMFUL)
    assert shown.isprintable()
    assert "\\x1b]0;x\\x07" in shown
    assert "\\u202e" in shown


def test_what_is_harmless_stays() -> None:
    assert on_terminal(HARMLESS) == HARMLESS


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_says_is_exact_in_a_pipe_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `baton generate` wrote escape sequences to terminals, and dropped some in pipes."""
    stream = _Stream(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    _print_text(HARMFUL + HARMLESS)
    expected = HARMFUL + HARMLESS
    assert stream.getvalue() == (on_terminal(expected) if is_terminal else expected)


def test_an_error_that_quotes_a_server_controls_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_error(f"model: \udcff {HARMFUL}")
    line = capsys.readouterr().err
    assert line.startswith("error: model: \\udcff \\x1b]0;x\\x07")
    assert line.removesuffix("\n").isprintable()
