"""OfflinePooling: computes embeddings, scores and labels with one engine, for `LLM`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Self

from baton.api.errors import BatonError, DamagedModelError, InvalidRequestError
from baton.api.outputs import RequestDelta
from baton.api.pooling import (
    Classification,
    Embedding,
    PoolingParams,
    Score,
    check_pooling_params,
    cosine,
)
from baton.api.prompt import check_prompt
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.pooling.answers import (
    check_classifies,
    check_embeds,
    check_scores,
    classification_of,
    embedding_of,
    params_of,
    prompt_before,
    score_of,
)
from baton.checkpoint.pooling.leaders import find_leaders
from baton.checkpoint.pooling.pairs import pair_messages, pair_text, takes_pairs
from baton.checkpoint.pooling.setup import PoolingSetup, PoolingTask
from baton.text.tokenizer import Tokenizer
from engine.core.request import Request
from engine.engine import Engine

Text = str | Sequence[int]
# Pooled requests sample no tokens; these parameters only make a request end after its prompt.
_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0)


class PooledAnswer:
    """The result of one pooled request, empty until the request ends.

    Attributes:
        ended: whether the engine has ended the request.
        pooled: the result's values, see `RequestDelta.pooled`; empty: the request was aborted.
        error: why the engine cannot continue the request; None: it can.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ended = False
        self.pooled = b""
        self.error: BatonError | None = None

    def on_delta(self, output: RequestDelta) -> None:
        """Store the only output of the request."""
        self.ended = output.finish_reason is not None
        self.pooled = output.pooled

    def end_early(self, error: BatonError | None = None) -> None:
        """End the request without a result; ``error`` tells why the engine cannot continue."""
        self.ended, self.error = True, error

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self.request.num_hit_tokens


class OfflinePooling:
    """Computes embeddings, scores and labels of texts with one engine.

    Args:
        setup: which embeddings, scores or labels the checkpoint can compute.
        tokenizer: the checkpoint's tokenizer; None: inputs must be token ids.
        run: runs pooled requests until all have ended.
    """

    def __init__(
        self,
        engine: Engine,
        setup: PoolingSetup,
        tokenizer: Tokenizer | None,
        run: Callable[[Sequence[PooledAnswer]], None],
    ) -> None:
        self.setup = setup
        self._engine, self._tokenizer, self._run = engine, tokenizer, run
        self._numbers = itertools.count(1)  # numbers for request ids; safe from several threads

    def with_run(self, run: Callable[[Sequence[PooledAnswer]], None]) -> Self:
        """Return a copy of this object that calls another function to run its requests."""
        other = copy.copy(self)
        other._run = run
        return other

    def embed(
        self,
        inputs: Sequence[Text],
        adapter: str,
        *,
        prompt_name: str | None,
        dimensions: int | None,
    ) -> list[Embedding]:
        """Return the embedding of each input; raises InvalidRequestError."""
        check_embeds(self.setup, dimensions)
        answers = self._pool([self._input_ids(one, prompt_name) for one in inputs], adapter)
        return [
            embedding_of(
                self.setup,
                one.pooled,
                one.num_prompt_tokens,
                one.num_cached_tokens,
                dimensions=dimensions,
            )
            for one in answers
        ]

    def score(
        self, pairs: Sequence[tuple[str, str]], adapter: str, *, instruction: str
    ) -> list[Score]:
        """Return the relevance of each pair's document to its query; raises InvalidRequestError."""
        check_scores(self.setup)
        if self.setup.task is PoolingTask.EMBED:
            return self._compare(pairs, adapter)
        answers = self._pool([self._pair_ids(*pair, instruction) for pair in pairs], adapter)
        return [
            Score(score_of(self.setup, one.pooled), one.num_prompt_tokens, one.num_cached_tokens)
            for one in answers
        ]

    def _compare(self, pairs: Sequence[tuple[str, str]], adapter: str) -> list[Score]:
        """Return the cosine of the two embeddings of each pair; embed each different text once."""
        names = [name if name in self.setup.prompts else None for name in ("query", "document")]
        texts = [list(dict.fromkeys(side)) for side in zip(*pairs, strict=True)]
        found = [
            dict(
                zip(
                    side,
                    self.embed(side, adapter, prompt_name=name, dimensions=None),
                    strict=True,
                )
            )
            for side, name in zip(texts, names, strict=True)
        ]
        both = [(found[0][query], found[1][document]) for query, document in pairs]
        return [
            Score(
                cosine(one.vector, other.vector),
                one.num_prompt_tokens + other.num_prompt_tokens,
                one.num_cached_tokens + other.num_cached_tokens,
            )
            for one, other in both
        ]

    def classify(self, inputs: Sequence[Text], adapter: str) -> list[Classification]:
        """Return the most probable label of each input; raises InvalidRequestError."""
        check_classifies(self.setup)
        answers = self._pool([self._input_ids(one, "") for one in inputs], adapter)
        return [
            classification_of(self.setup, one.pooled, one.num_prompt_tokens, one.num_cached_tokens)
            for one in answers
        ]

    # ------------------------------------------------------------------ inside

    def _pool(self, prompts: Sequence[list[int]], adapter: str) -> list[PooledAnswer]:
        """Check all prompts, then run one request per prompt; return the results."""
        engine, config = self._engine, self._engine.model_config
        params = params_of(self.setup, self._answer_ids())
        check_pooling_params(params, vocab_size=config.vocab_size, num_labels=config.num_labels)
        for token_ids in prompts:
            check_prompt(
                token_ids,
                vocab_size=config.vocab_size,
                max_model_len=engine.max_model_len,
                field="input",
            )
        answers = [PooledAnswer(self._request(ids, params, adapter)) for ids in prompts]
        orders = ((), range(len(answers))) if params.needs_all_rows else find_leaders(prompts)
        for order in orders:
            self._run([answers[place] for place in order])
        if (error := next(filter(None, (answer.error for answer in answers)), None)) is not None:
            raise error
        if any(not answer.pooled for answer in answers):
            raise DamagedModelError("the model's hidden states are not numbers")
        return answers

    def _request(self, token_ids: list[int], params: PoolingParams, adapter: str) -> Request:
        return Request.create(
            f"offline-pooled-{next(self._numbers)}",
            token_ids,
            _NO_SAMPLING,
            seed=0,
            eos_token_ids=frozenset(),
            max_model_len=self._engine.max_model_len,
            adapter=adapter,
            pooling=params,
        )

    def _input_ids(self, given: Text, prompt_name: str | None) -> list[int]:
        """Return the token ids of an input; if it is a text, put the named prompt before it."""
        if not isinstance(given, str):
            return [int(token_id) for token_id in given]
        return self._needed_tokenizer().encode(prompt_before(self.setup, prompt_name) + given)

    def _pair_ids(self, query: str, document: str, instruction: str) -> list[int]:
        """Return the token ids of the prompt that asks a reranker about a pair."""
        tokenizer, setup = self._needed_tokenizer(), self.setup
        instruction = instruction or prompt_before(setup, None)
        template = tokenizer.chat_template
        if template is not None and takes_pairs(template.source(with_tools=False)):
            return tokenizer.encode_chat(pair_messages(query, document, instruction))
        if setup.task is PoolingTask.CLASSIFY:
            return tokenizer.encode_pair(query, document)
        text = pair_text(query, document, instruction)
        return tokenizer.encode(text, add_special_tokens=False)

    def _answer_ids(self) -> tuple[int, ...]:
        """Return a reranker's token ids of yes and no; empty: this is no reranker."""
        if self.setup.task is not PoolingTask.RERANK:
            return ()
        return self.setup.answer_ids or self._needed_tokenizer().answer_ids()

    def _needed_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            problem = "this checkpoint has no tokenizer.json: give token ids"
            raise InvalidRequestError("input", problem)
        return self._tokenizer


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair each document with its query; raises InvalidRequestError if the counts differ."""
    texts = [documents] if isinstance(documents, str) else list(documents)
    asked = [queries] if isinstance(queries, str) else list(queries)
    if len(asked) == 1:
        asked *= len(texts)
    if len(asked) != len(texts):
        problem = f"must be one, or one per document ({len(texts)}), got {len(asked)}"
        raise InvalidRequestError("queries", problem)
    return list(zip(asked, texts, strict=True))
