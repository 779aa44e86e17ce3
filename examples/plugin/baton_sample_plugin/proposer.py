"""A proposer that drafts the last token again. Wrong drafts do not change any token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from engine.core.request import Request


class RepeatProposer:
    """Drafts each request's last token again."""

    def __init__(self, config: EngineConfig) -> None:
        pass

    def store_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        return [(request.token_ids[-1],) * num_drafts for request in requests]

    def forget(self, request: Request) -> None:
        pass
