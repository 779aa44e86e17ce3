"""InStepsProposer: passes on the drafts that a worker made in the latest step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from engine.core.request import Request


class InStepsProposer:
    """Drafts that workers make; see `engine.speculation.base.Proposer` for the contract."""

    def __init__(self, config: EngineConfig) -> None:
        self._latest: Mapping[str, tuple[int, ...]] = {}

    def store_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        self._latest = drafts

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        """Return the drafts of the latest step; drafts of older steps are out of date."""
        latest = self._latest
        return [latest.get(request.request_id, ())[:num_drafts] for request in requests]

    def forget(self, request: Request) -> None:
        pass
