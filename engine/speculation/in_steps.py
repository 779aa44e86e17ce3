"""InStepsProposer: passes on what the worker guessed in the step that sampled the last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from engine.core.request import Request


class InStepsProposer:
    """See `engine.speculation.base.Proposer` for the contract."""

    def __init__(self, config: EngineConfig) -> None:
        self._latest: Mapping[str, tuple[int, ...]] = {}

    def take(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        self._latest = drafts

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        """Guesses of another step are out of date: nothing is kept."""
        latest = self._latest
        return [latest.get(request.request_id, ())[:num_drafts] for request in requests]

    def forget(self, request: Request) -> None:
        pass
