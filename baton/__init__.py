"""Baton's ground: what every program and every client stands on. Never imports torch."""

from typing import TYPE_CHECKING, Any

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
