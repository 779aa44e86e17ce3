"""CommandError: a command cannot be done."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot be done.

    Args:
        message: one line; a field in front of it is one of the command's.
        exit_code: of the command.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
