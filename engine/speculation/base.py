"""Proposer: the engine's interface to a source of drafts. Refuses to know: tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.engine_config import EngineConfig
from engine.core.request import Request


class Proposer(Protocol):
    """A source of drafts, which propose the next tokens of requests; owned by the engine's thread.

    By default, wrong drafts do not change any output: a step samples the right token in a draft's
    place, and accepts the draft only if it equals the sampled token. With rejection sampling,
    drafts do not change the distribution of outputs (docs/speculation.md).
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raise ConfigError or ModelLoadError if this proposer cannot work with the options."""

    def store_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Store the drafts that a worker made in the latest step, by request id."""

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        """Propose up to ``num_drafts`` tokens that may follow each request's ``token_ids``."""

    def forget(self, request: Request) -> None:
        """Drop all data that the proposer has about a request."""
