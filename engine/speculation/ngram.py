"""NgramProposer: what came before, in prompt or output, behind the words that an output ends with.

"Prompt lookup decoding" (A. Saxena, github.com/apoorvumang/prompt-lookup-decoding), on outputs too.
Good where an output repeats its prompt: editing, summaries, questions about a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from baton_kernels.lookup import Text
from engine.core.request import Request


class NgramProposer:
    """See `engine.speculation.base.Proposer` for the contract."""

    def __init__(self, config: EngineConfig) -> None:
        self._least, self._most = config.ngram_min, config.ngram_max
        self._texts: dict[Request, Text] = {}

    def take(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        assert not drafts, "nobody else guesses"

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[tuple[int, ...]]:
        """Microseconds for each request, with a text of some thousand tokens."""
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
