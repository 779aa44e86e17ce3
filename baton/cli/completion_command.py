"""`baton completion SHELL`: the script by which a shell completes commands, options and nodes."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Shell(enum.Enum):
    """The shells that can complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that will read it.")],
) -> None:
    """Print a script that has a shell complete commands, options and names of nodes.

    Now: source <(baton completion bash). For good: baton --install-completion, or this output in
    ~/.bashrc, ~/.zshrc or ~/.config/fish/completions/baton.fish.
    """
    # Imported here: who asks for help does not wait for it.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="baton", complete_var="_BATON_COMPLETE", shell=shell.value
    )
    typer.echo(script)
