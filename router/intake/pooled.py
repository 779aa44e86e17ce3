"""PooledRequests: computes embeddings, scores and labels, for all public APIs.

A request has many inputs. Each input becomes a call of its own, which the gate, placement and
retries treat like any other prompt. Only a few of a request's calls run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.api.errors import (
    DamagedModelError,
    DeadlineExceededError,
    InvalidRequestError,
    NodeUnavailableError,
)
from baton.api.outputs import Receipt
from baton.api.pooling import (
    Classification,
    Embedding,
    PoolingParams,
    Score,
    cosine,
    pooled_problem,
)
from baton.api.prompt import choice_request_id
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
from baton.checkpoint.pooling.setup import PoolingTask
from router.calls.call import Call, Terms
from router.intake.intake import Intake
from router.intake.prompt_reader import PairPrompt
from router.intake.texts import ChatPrompt

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 2**20  # maximum number of tokens of a request's inputs together
MAX_NUMBERS = 2**21  # maximum number of float32 values in a response: 8 MiB
_AT_ONCE = 64  # maximum number of calls of one request that wait or run at the same time
# Sampling parameters of a pooled call, which samples nothing: they only end the call after its
# prompt.
_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0, seed=0)

Text = str | Sequence[int]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pooled(Generic[Result]):
    """The results of one request, one per input, and the receipts of its calls."""

    results: list[Result]
    receipts: list[Receipt]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens for one in self.receipts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(one.num_cached_tokens for one in self.receipts)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The pooled values of one call, as bytes, and its receipt."""

    pooled: bytes
    receipt: Receipt


class PooledRequests:
    """Serves the pooled requests of one base model.

    Args:
        intake: checks and runs the calls.
        terms: the client's terms.
        request_id: id of the first call; the other calls' ids have ``-1``, ``-2`` and so on
            appended.
    """

    def __init__(self, intake: Intake, terms: Terms, request_id: str = "") -> None:
        self._intake, self._setup, self._terms = intake, intake.abilities.setup, terms
        self._request_id = request_id or uuid.uuid4().hex
        self._num_calls = 0

    async def embed(
        self,
        inputs: Sequence[Text],
        *,
        field: str = "input",
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> Pooled[Embedding]:
        """Return the embedding of each input.

        Args:
            field: name of the inputs' field, for errors.
            prompt_name: see `prompt_before`.
            dimensions: number of leading values to keep of each embedding; None: all.

        Raises InvalidRequestError, and the errors of `Dispatcher.run`.
        """
        setup = self._setup
        check_embeds(setup, dimensions)
        check_num_inputs(field, len(inputs), dimensions or setup.hidden_size)
        before = prompt_before(setup, prompt_name)
        prompts = await self._tokenize(
            (before + one if isinstance(one, str) else one for one in inputs), field, len(inputs)
        )
        found = await self._run(prompts, params_of(setup), field)
        return await _pooled(
            found,
            lambda one: embedding_of(
                setup,
                one.pooled,
                one.receipt.num_prompt_tokens,
                one.receipt.num_cached_tokens,
                dimensions=dimensions,
            ),
        )

    async def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        fields: tuple[str, str] = ("queries", "documents"),
        instruction: str = "",
    ) -> Pooled[Score]:
        """Return how well each document fits its query.

        Args:
            queries: one query for all documents, or one query per document.
            fields: names of the fields of queries and documents, for errors.
            instruction: for rerankers, the task in words; empty: the checkpoint's own instruction.

        Raises InvalidRequestError, and the errors of `Dispatcher.run`.
        """
        setup = self._setup
        check_scores(setup)
        check_num_inputs(fields[1], len(documents))
        if len(queries) not in (1, len(documents)):
            problem = f"must be one, or one per document ({len(documents)}), got {len(queries)}"
            raise InvalidRequestError(fields[0], problem)
        if setup.task is PoolingTask.EMBED:
            return await self._compare(queries, documents, fields)
        asked = [*queries] * len(documents) if len(queries) == 1 else queries
        instruction = instruction or prompt_before(setup, None)
        prompts = await self._tokenize(
            # Prompts are made one by one: 2,048 prompts that each contain a long query would fill
            # the memory.
            (self._pair(*pair, instruction) for pair in zip(asked, documents, strict=True)),
            fields[1],
            len(documents),
            add_special_tokens=False,
        )
        found = await self._run(prompts, params_of(setup, self._answer_ids()), fields[1])
        return await _pooled(
            found,
            lambda one: Score(
                score_of(setup, one.pooled),
                one.receipt.num_prompt_tokens,
                one.receipt.num_cached_tokens,
            ),
        )

    async def _compare(
        self, queries: Sequence[str], documents: Sequence[str], fields: tuple[str, str]
    ) -> Pooled[Score]:
        """Return the cosine of the embeddings of each query and its document.

        A single query for all documents is embedded once.
        """
        names = [name if name in self._setup.prompts else None for name in ("query", "document")]
        of_queries = await self.embed(queries, field=fields[0], prompt_name=names[0])
        of_documents = await self.embed(documents, field=fields[1], prompt_name=names[1])
        _check_one_version(of_queries.receipts + of_documents.receipts)
        lone = of_queries.results[0] if len(queries) == 1 else None
        scores = []
        for place, other in enumerate(of_documents.results):
            one = lone or of_queries.results[place]
            num_tokens = one.num_prompt_tokens + other.num_prompt_tokens
            num_cached = one.num_cached_tokens + other.num_cached_tokens
            scores.append(Score(cosine(one.vector, other.vector), num_tokens, num_cached))
            # Let other tasks run, because comparing many long vectors takes long.
            await asyncio.sleep(0)
        return Pooled(scores, of_queries.receipts + of_documents.receipts)

    async def classify(
        self, inputs: Sequence[Text], *, field: str = "input"
    ) -> Pooled[Classification]:
        """Return the labels of each input, with their probabilities.

        Raises InvalidRequestError, and the errors of `Dispatcher.run`.
        """
        setup = self._setup
        check_classifies(setup)
        check_num_inputs(field, len(inputs), len(setup.labels))
        prompts = await self._tokenize(inputs, field, len(inputs))
        found = await self._run(prompts, params_of(setup), field)
        return await _pooled(
            found,
            lambda one: classification_of(
                setup, one.pooled, one.receipt.num_prompt_tokens, one.receipt.num_cached_tokens
            ),
        )

    # ------------------------------------------------------------------ prompts

    def _pair(self, query: str, document: str, instruction: str) -> str | ChatPrompt | PairPrompt:
        """Return the prompt from which the model judges how well a document fits a query."""
        tokenizer = self._intake.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        if template is not None and takes_pairs(template.source(with_tools=False)):
            return ChatPrompt(pair_messages(query, document, instruction))
        if self._setup.task is PoolingTask.CLASSIFY:
            return PairPrompt(query, document)
        return pair_text(query, document, instruction)

    def _answer_ids(self) -> tuple[int, ...]:
        """Return the tokens for yes and no, whose probabilities give a reranker's score."""
        if self._setup.task is not PoolingTask.RERANK or self._setup.answer_ids:
            return self._setup.answer_ids
        tokenizer = self._intake.tokenizer
        return () if tokenizer is None else tokenizer.answer_ids()

    async def _tokenize(
        self,
        prompts: Iterable[Text | ChatPrompt | PairPrompt],
        field: str,
        number: int,
        *,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Return the token ids of all prompts.

        Raises:
            InvalidRequestError: an input is wrong; the error names the input.
            OverloadedError: the caller's limits allow no request now; nothing was tokenized.
        """
        self._intake.check_terms(self._terms, self._request_id)
        found: list[list[int]] = []
        num_tokens = 0
        for place, prompt in enumerate(prompts):
            with _named(field, place, number):
                token_ids = await self._intake.reader.tokenize(
                    prompt, self._terms.principal, add_special_tokens=add_special_tokens
                )
            num_tokens += len(token_ids)
            if num_tokens > MAX_INPUT_TOKENS:
                problem = f"must have at most {MAX_INPUT_TOKENS} tokens together"
                raise InvalidRequestError(field, problem)
            found.append(token_ids)
            # Let other tasks run, because tokenizing many prompts takes long
            await asyncio.sleep(0)
        return found

    # ------------------------------------------------------------------ calls

    async def _run(
        self, prompts: Sequence[list[int]], params: PoolingParams, field: str
    ) -> list[_Numbers]:
        """Run one call per prompt; begin no call unless all prompts are valid."""
        calls: list[Call] = []
        for place, token_ids in enumerate(prompts):
            name = choice_request_id(self._request_id, self._num_calls)
            self._num_calls += 1
            with _named(field, place, len(prompts)):
                call = await self._intake.accept(
                    token_ids, _NO_SAMPLING, self._terms, self._request_id, generates=False
                )
            calls.append(dataclasses.replace(call, request_id=name, pooling=params))
        accepted_at = asyncio.get_running_loop().time()
        found: dict[int, _Numbers] = {}
        orders = ((), range(len(calls))) if params.needs_all_rows else find_leaders(prompts)
        for order in orders:
            await self._run_some(calls, order, accepted_at, found)
        # If the nodes changed their weights meanwhile, the calls that the old weights computed are
        # repeated.
        newest = next(reversed(found.values())).receipt.weights
        old = [place for place, one in found.items() if one.receipt.weights != newest]
        await self._run_some(calls, old, accepted_at, found)
        results = [found[place] for place in range(len(calls))]
        _check_one_version([one.receipt for one in results])
        return results

    async def _run_some(
        self,
        calls: Sequence[Call],
        order: Sequence[int],
        accepted_at: float,
        found: dict[int, _Numbers],
    ) -> None:
        """Run some calls, a few at once, and put their results into ``found``.

        The first error ends all of these calls and is raised.

        Args:
            order: places of the calls to run, in order.
            accepted_at: when the request was accepted, by the event loop's clock.
        """
        left = iter(order)

        async def work() -> None:
            for place in left:
                found[place] = await self._run_one(calls[place], accepted_at)

        tasks = [asyncio.create_task(work()) for _ in range(min(self._num_at_once, len(order)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _num_at_once(self) -> int:
        """Maximum number of a request's calls that may run at once, within the caller's limit."""
        of_key = self._terms.principal.limits.max_open_requests
        limit = of_key or self._intake.admission.options.max_open_requests_per_client
        return min(_AT_ONCE, limit) if limit and self._terms.principal.name else _AT_ONCE

    async def _run_one(self, call: Call, accepted_at: float) -> _Numbers:
        left_s = call.timeout_s - (asyncio.get_running_loop().time() - accepted_at)
        if left_s <= 0:
            raise DeadlineExceededError("the request's deadline passed")
        stream = self._intake.stream(dataclasses.replace(call, timeout_s=left_s))
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                if problem := pooled_problem(delta.pooled):
                    raise DamagedModelError(f"a prefill node answered without numbers: {problem}")
                assert delta.receipt is not None
                return _Numbers(delta.pooled, delta.receipt)
        raise DamagedModelError("a prefill node answered without numbers")


def check_num_inputs(field: str, number: int, size: int = 0) -> None:
    """Raise InvalidRequestError if a request has no input or too many.

    Args:
        size: number of values that the response has per input.
    """
    if not 1 <= number <= MAX_INPUTS:
        raise InvalidRequestError(field, f"must have 1 to {MAX_INPUTS} inputs, got {number}")
    if number * size > MAX_NUMBERS:
        problem = f"must have at most {MAX_NUMBERS // size} inputs of {size} numbers each"
        raise InvalidRequestError(field, f"{problem}, got {number}")


def _check_one_version(receipts: Sequence[Receipt]) -> None:
    """Raise NodeUnavailableError unless all results come from one version of the weights."""
    if len({one.weights for one in receipts}) > 1:
        raise NodeUnavailableError("the nodes' weights changed meanwhile: try again")


async def _pooled(found: Sequence[_Numbers], make: Callable[[_Numbers], Result]) -> Pooled[Result]:
    """Make the result of each call.

    Lets other tasks run in between, because making two million values takes long.
    """
    results = []
    for one in found:
        results.append(make(one))
        await asyncio.sleep(0)
    return Pooled(results, [one.receipt for one in found])


@contextlib.contextmanager
def _named(field: str, place: int, number: int) -> Iterator[None]:
    """In errors about a prompt, name the input field that the prompt was made from."""
    try:
        yield
    except InvalidRequestError as error:
        # The prompt of a pair may be a chat, whose errors name messages
        if error.field not in ("prompt", "messages"):
            raise
        raise error.of_field(field if number == 1 else f"{field}[{place}]") from None
