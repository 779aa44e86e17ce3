"""Adapter digests: an adapter's identity, SHA-256 over its settings and tensors, as hex digits.

Only routers and `LLM` know the names of adapters. Caches, commands and nodes use the digest, so if
an adapter changes but keeps its name, no KV of the old adapter is used.

    SHA-256( "baton adapter 1" | settings as JSON | name, dtype, shape, bytes of each tensor ... )

Tensors are hashed in the order of their names, so their order in the file does not matter, nor does
the file's metadata.
"""

from __future__ import annotations

import re

from baton.api.errors import InvalidRequestError, NodeUnavailableError

AdapterDigest = str  # 64 hex digits in lower case; "" in requests: the base model
NO_ADAPTER: AdapterDigest = ""
DIGEST_CHARS = 64
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")


class AdapterError(InvalidRequestError):
    """An adapter's files are damaged or unsupported, or do not fit the base model.

    Args:
        problem: the file or tensor, the fault and the limit, in one line.

    Attributes:
        problem: the argument ``problem``.
    """

    def __init__(self, problem: str) -> None:
        super().__init__("adapter", problem)
        self.problem = problem


class AdapterMissingError(NodeUnavailableError):
    """A failure to load a request's adapter on this node; another node may be able to load it."""


def is_digest(text: str) -> bool:
    """Return whether a text has the form of an adapter's digest."""
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
    """Return the first digits of a digest, for log lines and tables."""
    return digest[:12]
