"""Baton: the names that users import. Heavy modules are imported when first used.

    from baton import LLM, Client, SamplingParams

The rest of `baton` is shared by all programs and clients. Only `LLM` and `AsyncLLM` need torch.
"""

import os
from typing import TYPE_CHECKING, Any

# Keeps gRPC's core from printing a line per failed TLS handshake. gRPC reads this variable at its
# import.
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
    from engine import AsyncLLM as AsyncLLM

# `LLM` and `AsyncLLM` are left out, so that `from baton import *` works without torch.
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


def _import_engine(name: str) -> Any:
    """Import a name from Baton's package `engine`, even if the user's folder has an `engine.py`."""
    from baton.own_packages import prefer_own_packages, warn_of_hidden_files

    prefer_own_packages()
    from engine import LLM, AsyncLLM

    warn_of_hidden_files()
    return {"LLM": LLM, "AsyncLLM": AsyncLLM}[name]


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept wrong names

    def __getattr__(name: str) -> Any:
        """Import a heavy module on first use: gRPC for clients, torch for `LLM` and `AsyncLLM`.

        Raises:
            ModuleNotFoundError: an extra that the engine needs is missing; the message names it.
        """
        if name in ("LLM", "AsyncLLM"):
            return globals().setdefault(name, _import_engine(name))
        if name in ("AsyncClient", "Client"):
            from baton.client import client

            return getattr(client, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
