"""Runs Python functions in child processes, and reads the JSON that they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.environment import ROOT


def own_environment(*trees: Path, **variables: str) -> dict[str, str]:
    """Return environment variables that let `python` import from ``trees`` and this checkout.

    Python looks into ``trees`` first, then into this checkout, and last into the folders of this
    process's PYTHONPATH. Python may write compiled modules to files,
    as in an installation, because otherwise each start would compile all modules.
    """
    folders = [folder for tree in trees or (ROOT,) for folder in (tree, tree / "kernels")]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(map(str, (*folders, *([ROOT] if trees else []), *given)))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def call_words(function: str, *words: object) -> list[str]:
    """Return the command that runs a function, "package.module:function", in a new process."""
    return [sys.executable, "-P", "-m", "benchmarks", "--call", function, *map(str, words)]


def answer_of(command: Sequence[object], limit_s: float | None = None, **options: Any) -> Any:
    """Run a program; return the last mapping that it prints as JSON.

    Args:
        options: options of `subprocess.run`; without ``env``, it is `own_environment()`.

    Raises:
        subprocess.SubprocessError: the program fails or takes too long.
        ValueError: the program prints no mapping.
    """
    given: dict[str, Any] = {"env": own_environment(), "stderr": subprocess.PIPE, **options}
    done = subprocess.run(
        list(map(str, command)),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=limit_s,
        **given,
    )
    mappings = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(mappings[-1] if mappings else done.stdout)


def end_group(process: subprocess.Popen[Any], patience_s: float = 10.0) -> None:
    """End a process that leads a session, and all other processes of this session."""
    for stop in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, stop)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
