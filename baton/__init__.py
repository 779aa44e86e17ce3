"""Baton: the names that users import. What is heavy is imported when it is first asked for.

    from baton import LLM, Client, SamplingParams

Below it is the ground that every program and every client stands on. Only `LLM` needs torch.
"""

import os
from typing import TYPE_CHECKING, Any

# Else gRPC's core writes a line of its own for every TLS handshake that fails, at both ends. It is
# read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from baton.api.errors import BatonError
from baton.api.outputs import Completion, FinishReason, Receipt, TextDelta
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.api.thinking import Thinking
from baton.version import __version__

if TYPE_CHECKING:
    from baton.client.client import AsyncClient, Client
    from engine import LLM as LLM

# Without LLM: `from baton import *` works without torch.
__all__ = [
    "AsyncClient",
    "BatonError",
    "Client",
    "Completion",
    "FinishReason",
    "Receipt",
    "SamplingParams",
    "StructuredOutput",
    "TextDelta",
    "Thinking",
    "__version__",
]


def _import_llm() -> Any:
    """Import our engine, and no `engine.py` that lies where Python looks first."""
    from baton.own_packages import prefer_own_packages, warn_of_hidden_files

    prefer_own_packages()
    from engine import LLM

    warn_of_hidden_files()
    return LLM


if not TYPE_CHECKING:  # a checker knows the names of above, and that there are no others

    def __getattr__(name: str) -> Any:
        """Import what is heavy when somebody asks for it: gRPC for clients, torch for `LLM`.

        Raises:
            ModuleNotFoundError: `LLM` without the extra that it needs, which the message names.
        """
        if name == "LLM":
            return globals().setdefault(name, _import_llm())
        if name in ("AsyncClient", "Client"):
            from baton.client import client

            return getattr(client, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
