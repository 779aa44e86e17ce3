"""Adapter digests: an adapter's identity, SHA-256 over its settings and tensors as text.

Names of adapters are aliases that only routers and `LLM` know. Caches, commands and nodes use the
digest, so a changed adapter under an old name never finds the old adapter's KV.

    SHA-256( "baton adapter 1" | settings as JSON | name, dtype, shape, bytes of each tensor ... )

Tensors come in order of their names. Neither the order of a file nor its metadata matters.
"""

from __future__ import annotations

import re

from baton.api.errors import InvalidRequestError, NodeUnavailableError

AdapterDigest = str  # 64 hexadecimal digits, in lower case; in requests, "" is the base model
NO_ADAPTER: AdapterDigest = ""
DIGEST_CHARS = 64
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")


class AdapterError(InvalidRequestError):
    """An adapter's files are damaged or unsupported, or do not fit the base model.

    Args:
        problem: the file or tensor, the fault and the limit, in one line.

    Attributes:
        problem: as given.
    """

    def __init__(self, problem: str) -> None:
        super().__init__("adapter", problem)
        self.problem = problem


class AdapterMissingError(NodeUnavailableError):
    """A node does not have a request's adapter and cannot load it; another node may."""


def is_digest(text: str) -> bool:
    """Return whether a text could be an adapter's digest."""
    return _DIGEST.fullmatch(text) is not None


def check_digest(text: str) -> AdapterDigest:
    """Return an adapter's digest unchanged; raises InvalidRequestError for any other text."""
    if not is_digest(text):
        shown = f"{text!r:.80}"
        raise InvalidRequestError(
            "adapter", f"must be a digest of {DIGEST_CHARS} digits 0-9 and a-f, got {shown}"
        )
    return text


def shorten_digest(digest: AdapterDigest) -> str:
    """Return a digest's first digits, for log lines and tables."""
    return digest[:12]
