"""An environment of its own for each agent: a folder of npm, or a virtual environment of pip."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.clients.agents.agents import Agent
from tests.clients.environments import FOLDER, REQUIREMENTS, interpreter, run

# npm tells its maker nothing, and asks for nothing but packages.
_NPM = {
    "npm_config_audit": "false",
    "npm_config_fund": "false",
    "npm_config_update_notifier": "false",
}


def npm() -> str | None:
    """Return the path of npm; None where there is none."""
    return shutil.which("npm")


def command(agent: Agent) -> Path:
    """Return an agent's command, installing the agent first where it is not.

    Raises subprocess.CalledProcessError where it cannot be installed.
    """
    if not agent.is_of_npm:
        return interpreter(agent.package).with_name(agent.program)
    folder = FOLDER / agent.name
    wanted = (REQUIREMENTS / f"{agent.name}.json").read_text(encoding="utf-8")
    mark = folder / "made-of.txt"  # written last: an environment without it is not whole
    if not mark.exists() or mark.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text(wanted, encoding="utf-8")
        run(npm() or "npm", "install", "--silent", "--prefix", str(folder), env=os.environ | _NPM)
        mark.write_text(wanted, encoding="utf-8")
    return folder / "node_modules" / ".bin" / agent.program
