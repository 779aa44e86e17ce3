"""Unit tests of shell completion: scripts for each shell, and completions of typed words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = str(Path(sys.executable).parent)
BATON = f"{BIN}/baton"
pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(not Path(BATON).exists(), reason="baton is not on a path"),
]


def script_of(shell: str) -> str:
    return subprocess.run(
        [BATON, "completion", shell], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def told(typed: str, shell: str) -> str:
    """Return what the shell's script would get for a line that ends where the cursor is."""
    environment = {
        "bash": {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return subprocess.run(
        [BATON], env={"_BATON_COMPLETE": f"complete_{shell}", **environment},
        capture_output=True, text=True, check=False, timeout=60,
    ).stdout  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_it_reads(shell: str) -> None:
    script = script_of(shell)
    assert f"_BATON_COMPLETE=complete_{shell}" in script
    if (program := shutil.which(shell)) is not None:
        checked = subprocess.run(
            [program, "-n"], input=script, capture_output=True, text=True, check=False, timeout=60
        )
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("baton doc", "doctor"),
        ("baton admin quar", "quarantine"),
        ("baton up --api-keys", "--api-keys-file"),
        ("baton up --policy pref", "prefix_aware"),
    ],
)
def test_what_is_typed_is_completed(shell: str, typed: str, offered: str) -> None:
    assert offered in told(typed, shell)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_real_bash_completes_with_the_script() -> None:
    line = (
        f"PATH={BIN}:$PATH; source <(baton completion bash); COMP_WORDS=(baton lo); COMP_CWORD=1; "
        'complete -p baton; _baton_completion baton; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "loadtest"


def test_an_unknown_shell_is_refused_by_the_names_of_those_that_are_known() -> None:
    done = subprocess.run(
        [BATON, "completion", "tcsh"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr
