"""OfflineBeams: beam searches of `LLM` and `AsyncLLM`, as steps of requests for one token each.

Refuses to know: how the requests of a step run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.adapters.digest import AdapterDigest
from baton.api.beam_search import Beam, BeamCompletion, BeamSearch, BeamSearchParams
from baton.api.errors import RequestCancelledError
from baton.api.outputs import Completion, FinishReason
from baton.api.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from engine.offline.prompts import ReadPrompt


class OfflineBeams:
    """The beam searches of several prompts at once.

    The caller completes the prompts of `next_prompts`, and passes the completions to `advance`,
    until `next_prompts` is empty.

    Args:
        prompts: the prompts to search outputs for.
        params: parameters of every search.
        max_model_len: maximum number of tokens of prompt and output together.
        tokenizer: makes the outputs' texts; None: texts are empty.

    Attributes:
        sampling_params: parameters with which the prompts of a step must be completed.
    """

    def __init__(
        self,
        prompts: Sequence[ReadPrompt],
        params: BeamSearchParams,
        max_model_len: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._prompts, self._params, self._tokenizer = prompts, params, tokenizer
        self._max_model_len = max_model_len
        num = params.num_candidates
        self.sampling_params = SamplingParams(max_tokens=1, temperature=0, logprobs=num)
        self._begin()

    def _begin(self) -> None:
        # Versions of the weights, and adapters, that computed the searches' tokens
        self._weights, self._adapters = set[str](), set[AdapterDigest]()
        self._searches = [
            BeamSearch(
                self._params,
                min(self._params.max_tokens, self._max_model_len - len(prompt.token_ids)),
            )
            for prompt in self._prompts
        ]

    def next_prompts(self) -> list[ReadPrompt]:
        """Return the prompts to complete in the next step; empty: all searches have ended."""
        return [
            ReadPrompt([*prompt.token_ids, *beam.token_ids], prompt.images)
            for prompt, search in zip(self._prompts, self._searches, strict=True)
            if not search.done
            for beam in search.running
        ]

    def advance(
        self, completions: Sequence[Completion], adapters: Collection[AdapterDigest]
    ) -> None:
        """Extend all searches by one token.

        If the weights or the adapter have changed since the first step, all searches begin again:
        an output must not have tokens of two versions of either.

        Args:
            completions: a completion of each of `next_prompts`, in order.
            adapters: the adapters that computed the completions.

        Raises RequestCancelledError if a request was ended without a token.
        """
        for one in completions:
            if not one.logprobs:
                raise RequestCancelledError("a request of the beam search was aborted")
            if one.metrics is not None:
                self._weights.add(one.metrics.weights)
        self._adapters.update(adapters)
        if len(self._weights) > 1 or len(self._adapters) > 1:
            self._begin()
            return
        found = iter(one.logprobs[0].top for one in completions)
        for search in self._searches:
            if not search.done:
                search.advance([next(found) for _ in search.running])

    def results(self) -> list[list[BeamCompletion]]:
        """Return the outputs of each prompt, best first."""
        return [[self._completion(beam) for beam in one.finished] for one in self._searches]

    def _completion(self, beam: Beam) -> BeamCompletion:
        ended = beam.token_ids[-1] in self._params.end_token_ids
        return BeamCompletion(
            text=self._tokenizer.decode(beam.token_ids) if self._tokenizer else "",
            token_ids=beam.token_ids,
            logprob=beam.logprob,
            score=beam.score,
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        )
