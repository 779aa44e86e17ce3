"""The clients that Baton is tried with: each has a row here and in the docs, and a script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import REQUIREMENTS

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        package: name for pip; its files have this name, too.
        timeout_s: most seconds that the script may run.
        ranks: whether the script asks a model that ranks documents; otherwise a model of chats.
    """

    package: str
    timeout_s: float = 300.0
    ranks: bool = False

    @property
    def script(self) -> Path:
        """Return the script that tries the client."""
        return SCRIPTS / f"try_{self.package.replace('-', '_')}.py"

    @property
    def requirements(self) -> Path:
        """Return the requirements file of its environment."""
        return REQUIREMENTS / f"{self.package}.txt"

    @property
    def lowest_version(self) -> str:
        """The oldest release that its requirements allow: the one that it was tried with."""
        bound = rf"^{re.escape(self.package)}(?:\[[\w,-]+\])?>=([\d.]+)$"
        found = re.search(bound, self.requirements.read_text(encoding="utf-8"), re.MULTILINE)
        assert found, f"{self.requirements.name}: no line {self.package}>=VERSION"
        return found[1]


CLIENTS = (
    Client("openai"),
    Client("litellm"),
    Client("langchain-openai"),
    Client("instructor"),
    Client("openai-agents"),
    Client("pydantic-ai-slim"),
    Client("guidellm", timeout_s=600.0),
    Client("aiperf", timeout_s=600.0),
    Client("lm-eval", timeout_s=600.0),
    Client("grpc-requests"),
    Client("cohere", ranks=True),
)
