"""StateWriter: answers drawn from the states of grammars and thoughts alone, without an engine.

The states are those that an engine asks: whatever tokens a model might like, these let them pass.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.grammars import compile_grammar, load_grammar_tokenizer, make_grammar
from engine.core.grammars.grammar import GrammarState
from tests.fuzz.answer_writers.base import Written

_MAX_CACHED = 128


class StateWriter:
    """Draws tokens with the biases of a request, all other tokens alike.

    Args:
        folder: has the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        ends = config["eos_token_id"]
        self._vocab_size: int = config["vocab_size"]
        self._end_token_ids = frozenset(ends if isinstance(ends, list) else [ends])
        self._library = load_grammar_tokenizer(folder / "tokenizer.json", self._end_token_ids)
        self._num_tokens: int = self._library.vocab_size
        self._matchers: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._end_token_ids

    def check(self, params: SamplingParams) -> None:
        output = params.structured_output
        if output is None or output in self._matchers:
            return
        self._matchers[output] = compile_grammar(output, make_grammar(output), self._library)
        if len(self._matchers) > _MAX_CACHED:
            self._matchers.popitem(last=False)

    def write(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Written]:
        return [self._answer(params) for _, params in asked]

    def _answer(self, params: SamplingParams) -> Written:
        self.check(params)
        output, rng = params.structured_output, np.random.default_rng(params.seed)
        matcher = None if output is None else self._matchers[output].deep_copy()
        state = GrammarState(matcher, params, self._vocab_size, self._end_token_ids)
        weights = np.ones(self._num_tokens)
        for token_id, bias in params.logit_bias:
            weights[token_id] = np.exp(bias / params.temperature)
        token_ids = list[int]()
        while len(token_ids) < params.max_tokens:
            sums = np.cumsum(weights * self._allowed(state) if not state.num_free else weights)
            if not sums[-1]:
                return Written(tuple(token_ids), FinishReason.ABORT)
            drawn = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
            token_id = state.corrected(drawn)
            token_ids.append(token_id)
            if not state.accept(token_id):
                return Written(tuple(token_ids), FinishReason.ABORT)
            if token_id in self._end_token_ids or state.is_terminated:
                return Written(tuple(token_ids), FinishReason.STOP)
        return Written(tuple(token_ids), FinishReason.LENGTH)

    def _allowed(self, state: GrammarState) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        bits = state.allowed_bits()[0]
        return np.unpackbits(bits, bitorder="little")[: self._num_tokens]
