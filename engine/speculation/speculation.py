"""Speculation: asks a proposer for drafts behind what a step sampled, and forgets who has ended.

Refuses to know: who schedules drafts, who computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine_config import EngineConfig
from engine.core.outputs import StepResult
from engine.core.request import Request
from engine.speculation import PROPOSERS
from engine.speculation.base import Proposer

_SPARE = 16  # requests that may have ended without a word before anybody looks


class Speculation:
    """What is guessed for an engine's requests.

    Args:
        proposer: guesses.
        num_drafts: most guesses for a request.
        vocab_size: of the model.
    """

    def __init__(self, proposer: Proposer, num_drafts: int, vocab_size: int) -> None:
        self._proposer = proposer
        self._num_drafts, self._vocab_size = num_drafts, vocab_size
        self._known: dict[str, Request] = {}  # those that the proposer may keep something of

    def after_step(
        self, result: StepResult, requests: Mapping[str, Request]
    ) -> dict[str, tuple[int, ...]]:
        """Guess what comes behind the tokens of a step, by request id.

        Args:
            requests: that have not ended.
        """
        self._forget_ended(requests)
        going_on = [
            request
            for output in result.outputs
            if (request := requests.get(output.request_id)) is not None
            and request.max_num_tokens - request.num_tokens > 1
        ]
        return self._propose(going_on) if going_on else {}

    def first_drafts(self, request: Request) -> tuple[int, ...]:
        """Guess for a node that goes on with a request, which ends here."""
        drafts = self._propose([request]).get(request.request_id, ())
        self._proposer.forget(request)
        del self._known[request.request_id]
        return drafts

    def received(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """What may be computed of drafts that another node has guessed."""
        taken = tuple(drafts[: self._num_drafts])
        return taken if all(0 <= token_id < self._vocab_size for token_id in taken) else ()

    def _propose(self, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
        for request in requests:
            before = self._known.get(request.request_id)
            if before is not request:
                if before is not None:  # an earlier attempt
                    self._proposer.forget(before)
                self._known[request.request_id] = request
        proposed = self._proposer.propose(requests, self._num_drafts)
        return {
            request.request_id: drafts
            for request, drafts in zip(requests, proposed, strict=True)
            if drafts
        }

    def _forget_ended(self, requests: Mapping[str, Request]) -> None:
        """Now and then: most requests end by themselves, and some are aborted."""
        if len(self._known) <= 2 * len(requests) + _SPARE:
            return
        for request_id, request in list(self._known.items()):
            if requests.get(request_id) is not request:
                self._proposer.forget(request)
                del self._known[request_id]


def make_speculation(config: EngineConfig, vocab_size: int) -> Speculation | None:
    """What the options ask for; None: nobody guesses."""
    if not config.max_num_drafts:
        return None
    proposer = PROPOSERS.load(config.speculative_method)(config)
    return Speculation(proposer, config.max_num_drafts, vocab_size)
