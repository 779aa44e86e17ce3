"""Baton's ground: what every program and every client stands on. Never imports torch."""

import os
from typing import TYPE_CHECKING, Any

# Else gRPC's core writes a line of its own for every TLS handshake that fails, at both ends. It is
# read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from baton.errors import BatonError
from baton.outputs import Completion, FinishReason, Receipt, TextDelta
from baton.sampling_params import SamplingParams
from baton.structured_output import StructuredOutput
from baton.version import __version__

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client

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
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the clients, and gRPC with them, when somebody asks for one: workers never do."""
    if name not in ("AsyncClient", "Client"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from baton import client

    return getattr(client, name)
