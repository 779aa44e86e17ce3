"""A proposer that drafts each request's last token again; wrong drafts change no output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from engine.core.request import Request


class RepeatProposer:
    """Drafts the last token of each request again, ``num_drafts`` times."""

    def __init__(self, config: EngineConfig) -> None:
        pass

    def store_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        return [(request.token_ids[-1],) * num_drafts for request in requests]

    def forget(self, request: Request) -> None:
        pass
