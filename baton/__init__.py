"""Baton's ground: what every program and every client stands on. Never imports torch."""

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
