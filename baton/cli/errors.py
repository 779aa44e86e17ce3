"""CommandError: an error that ends a command."""

from __future__ import annotations


class CommandError(Exception):
    """An error that ends a command.

    Args:
        message: one line; may begin with the name of an option.
        exit_code: exit code of the command.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
