"""Baton's ground: what every program and every client stands on. Never imports torch."""

import os

# Else gRPC's core writes a line of its own for every TLS handshake that fails, at both ends. It is
# read when gRPC is imported, which is below.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from baton.client import AsyncClient, Client
from baton.errors import BatonError
from baton.outputs import Completion, FinishReason, Receipt, TextDelta
from baton.sampling_params import SamplingParams
from baton.structured_output import StructuredOutput
from baton.version import __version__

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
