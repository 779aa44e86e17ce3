"""`baton completion SHELL`: prints a script by which a shell completes commands and options."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Shell(enum.Enum):
    """Shells for which there is a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="Shell for which to write the script.")],
) -> None:
    """Print a script for a shell to complete commands, options and names of nodes.

    Now: source <(baton completion bash), or in fish: baton completion fish | source. For good:
    baton --install-completion, or this output in ~/.bashrc, ~/.zshrc or
    ~/.config/fish/completions/baton.fish.
    """
    # Import here, so that `--help` is fast.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="baton", complete_var="_BATON_COMPLETE", shell=shell.value
    )
    typer.echo(script)
