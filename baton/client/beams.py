"""Makes clients' messages of beam searches, and reads the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from baton.api.beam_search import BeamCompletion, BeamSearchParams, EarlyStopping
from baton.api.outputs import Completion, TextDelta
from baton.api.sampling_params import SamplingParams
from baton.client.messages import GenerateOptions, Prompt, join_batch, make_batch_request


class BeamCall:
    """One call of `Client.beam_search` or `AsyncClient.beam_search`; see there for the arguments.

    Attributes:
        request: the message for the router.

    Raises:
        InvalidRequestError: a prompt or a parameter is wrong.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        beam_width: int,
        max_tokens: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        **options: Unpack[GenerateOptions],
    ) -> None:
        self._beams = BeamSearchParams(
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        params = SamplingParams(n=beam_width, max_tokens=max_tokens, temperature=0, logprobs=0)
        self.request = make_batch_request(prompts, params, beams=self._beams, **options)

    def join(self, deltas: Sequence[TextDelta]) -> list[list[BeamCompletion]]:
        """Return the outputs of a beam search, by prompt, best first."""
        return [[self._beam(output) for output in outputs] for outputs in join_batch(deltas)]

    def _beam(self, output: Completion) -> BeamCompletion:
        logprob = 0.0
        # Added in the order of `BeamSearch`, so that sums of floats are equal
        for token in output.logprobs:
            logprob += token.logprob
        return BeamCompletion(
            text=output.text,
            token_ids=output.token_ids,
            logprob=logprob,
            score=self._beams.score(logprob, len(output.token_ids)),
            finish_reason=output.finish_reason,
        )
