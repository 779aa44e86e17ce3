"""Abilities: what a base model can do beside sampling tokens: thoughts, calls, pooling, beams.

Knows neither prompts nor texts.
"""

from __future__ import annotations

from baton.checkpoint.pooling.answers import check_generates
from baton.checkpoint.pooling.setup import GENERATES_ONLY, PoolingSetup
from router.calls.beam_run import BeamLimits, BeamRun, begin_search
from router.calls.call import Call
from router.calls.dispatcher import Dispatcher
from router.intake.parsers.choice import OutputParsers


class Abilities:
    """The abilities of one base model. A model that only pools needs no decode nodes.

    Args:
        dispatcher: runs calls on the model's nodes.
        vocab_size: size of the model's vocabulary.
        parsers: divide the outputs of conversations into reasoning, calls and answer.
        setup: which embeddings, scores or labels the model computes.
        end_token_ids: tokens that end an output, for beam searches.

    Attributes:
        parsers, setup: see the arguments.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        vocab_size: int,
        parsers: OutputParsers,
        setup: PoolingSetup = GENERATES_ONLY,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.parsers, self.setup = parsers, setup
        self._dispatcher, self._vocab_size = dispatcher, vocab_size
        self._end_token_ids = end_token_ids

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output that the joined nodes allow."""
        pool = self._dispatcher.pool
        return pool.max_model_len if self.setup.generates else pool.max_prompt_len

    @property
    def is_ready(self) -> bool:
        """Return whether nodes have joined that can serve a request now."""
        pool = self._dispatcher.pool
        return bool(pool.fleet if self.setup.generates else pool.prompt_fleet)

    @property
    def why_not_ready(self) -> str:
        """Return a reason, in one line, why no request can be served now."""
        pool = self._dispatcher.pool
        return pool.why_no_pair() if self.setup.generates else pool.why_no_prompt_node(1)

    def check_generates(self) -> None:
        """Raise InvalidRequestError if the model only pools and cannot generate text."""
        check_generates(self.setup)

    def search_beams(self, call: Call, num_outputs: int) -> BeamRun:
        """Return the beam search that a call asks for; raises the errors of `begin_search`."""
        limits = BeamLimits(self.max_model_len, self._vocab_size, self._end_token_ids)
        return begin_search(call, num_outputs, limits, self._dispatcher)
