"""NgramProposer: finds an earlier copy of the output's last tokens, and drafts the tokens after it.

The method is "Prompt lookup decoding" (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding),
extended to search the output, too. It works well if outputs repeat their prompts: editing,
summaries, questions about a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from baton_kernels.lookup import Text
from engine.core.request import Request


class NgramProposer:
    """Drafts copied from earlier text; see `engine.speculation.base.Proposer` for the contract."""

    def __init__(self, config: EngineConfig) -> None:
        self._least, self._most = config.ngram_min, config.ngram_max
        self._texts: dict[Request, Text] = {}

    def store_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        assert not drafts, "nobody else makes drafts"

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        """Copy drafts; takes some microseconds per request with a few thousand tokens."""
        proposed = []
        for request in requests:
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = Text()
            text.extend(request.token_ids[text.num_tokens :])
            proposed.append(text.continuation(num_drafts, self._least, self._most))
        return proposed

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)
