"""Proposer: what the engine needs of whoever guesses the next tokens. No tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.engine_config import EngineConfig
from engine.core.request import Request


class Proposer(Protocol):
    """Guesses what comes behind the known tokens of requests. The engine's thread owns it.

    No guess can do harm: a step computes it, samples what belongs in its place, and keeps it where
    both are the same (docs/speculation.md).
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError or ModelLoadError where it cannot guess with these options."""

    def take(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take what whoever computed the latest step guesses behind it, by request id."""

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        """Guess, for each request, up to ``num_drafts`` tokens behind its ``token_ids``."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request; harmless when nothing is."""
