"""A virtual environment for each client, made again when its requirements change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_TIMEOUT_S = 1200.0


def interpreter(client: str) -> Path:
    """The Python of a client's environment, with what its requirements file says installed.

    Raises subprocess.CalledProcessError where it cannot be installed.
    """
    folder = FOLDER / client
    python = folder / "bin" / "python"
    requirements = REQUIREMENTS / f"{client}.txt"
    made_of = f"Python {sys.version}\n{requirements.read_text(encoding='utf-8')}"
    mark = folder / "made-of.txt"  # written last: an environment without it is not whole
    if not mark.exists() or mark.read_text(encoding="utf-8") != made_of:
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        run(str(python), "-m", "pip", "install", "-qq", "--requirement", str(requirements))
        mark.write_text(made_of, encoding="utf-8")
    return python


def installed_version(python: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return run(str(python), "-P", "-c", program).strip()


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it printed.

    Args:
        env: environment of the command; None: that of this process.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=INSTALL_TIMEOUT_S, check=True, env=env
    )
    return done.stdout
