"""Settings of an agent, read from the page for users, so that tests use the documented settings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
_SECTION = re.compile(r"^### `([^`]+)` ([\d.]+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
# `~/.x/config.toml`: and the file, or lines for a shell
_BLOCK = re.compile(r"(?:`~/([^`]+)`:\n\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ADDRESS = "127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the page says of an agent.

    Attributes:
        version: the release that was tried.
        variables: environment variables.
        files: contents by path in the home folder.
    """

    version: str
    variables: dict[str, str]
    files: dict[str, str]

    def at(self, address: str) -> Settings:
        """Return the settings for a router at another address."""
        return Settings(
            self.version,
            {k: v.replace(_ADDRESS, address) for k, v in self.variables.items()},
            {k: v.replace(_ADDRESS, address) for k, v in self.files.items()},
        )


def read_settings() -> dict[str, Settings]:
    """Read the settings of all agents, by package."""
    found = {}
    for package, version, text in _SECTION.findall(PAGE.read_text(encoding="utf-8")):
        variables: dict[str, str] = {}
        files: dict[str, str] = {}
        for path, language, content in _BLOCK.findall(text):
            if path:
                files[path] = content
            elif language == "sh":
                words = shlex.split(content, comments=True)
                variables |= dict(word.split("=", 1) for word in words if "=" in word)
        found[package] = Settings(version, variables, files)
    return found
