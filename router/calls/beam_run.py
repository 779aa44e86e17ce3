"""BeamRun: searches the best outputs of one prompt by many calls of one token each.

step 1    prompt                    -> the most probable next tokens of the prompt
step 2    prompt + beams of step 1  -> the most probable next tokens of each beam, all at once
...

Nodes know nothing of beams: a step's prompts are found in the nodes' prefix caches, where beams
share blocks (ADR 0102). `BeamRun` knows neither nodes nor texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.access.identity import Principal
from baton.api.beam_search import (
    Beam,
    BeamSearch,
    BeamSearchParams,
    TopTokens,
    check_beam_sampling,
)
from baton.api.errors import DeadlineExceededError, InvalidRequestError
from baton.api.images import PromptImage
from baton.api.outputs import FinishReason, Receipt, TextDelta, TokenLogprobs
from baton.api.sampling_params import SamplingParams
from router.calls.call import Call
from router.calls.dispatcher import Dispatcher
from router.fleet.prefix.prompt_hashes import PromptHashes

# Maximum bytes of image files that one step of a search, and then a whole search, sends to nodes.
MAX_STEP_IMAGE_BYTES = 64 * 2**20
MAX_SEARCH_IMAGE_BYTES = 2**30
Run = Callable[[Call], AsyncGenerator[TextDelta, None]]


@dataclass(frozen=True, slots=True)
class BeamLimits:
    """Limits of beam searches that follow from the model.

    Attributes:
        max_model_len: maximum number of tokens of prompt and output together.
        vocab_size: number of tokens in the model's vocabulary.
        end_token_ids: tokens that end an output.
    """

    max_model_len: int
    vocab_size: int
    end_token_ids: frozenset[int]


def begin_search(
    call: Call, num_outputs: int, limits: BeamLimits, dispatcher: Dispatcher
) -> BeamRun:
    """Return the beam search that a call's terms ask for, and count it as one request.

    Args:
        num_outputs: number of outputs that the client wants.
        dispatcher: runs the calls of the search's steps.

    Raises:
        InvalidRequestError: a parameter is out of range, or not supported by beam search.
        OverloadedError: the caller's limits allow no request now.
    """
    params, beams, principal = call.sampling_params, call.terms.beams, call.terms.principal
    assert beams is not None
    check_beam_sampling(dataclasses.replace(params, n=num_outputs), beams.beam_width)
    _check_images(call, beams.beam_width)
    ends = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        ends |= limits.end_token_ids
    most_open = principal.limits.max_open_requests
    if most_open and beams.beam_width > most_open:
        problem = f"must be at most {most_open}, the requests that this API key may have open"
        raise InvalidRequestError("beam_width", f"{problem}; got {beams.beam_width}")
    beams = dataclasses.replace(beams, max_tokens=params.max_tokens, end_token_ids=ends)
    if beams.num_candidates > limits.vocab_size:
        raise InvalidRequestError("beam_width", "is too large for the model's vocabulary")
    dispatcher.admission.charge(principal)
    room = limits.max_model_len - len(call.prompt_token_ids)
    return BeamRun(call, beams, room, dispatcher.run)


def most_search_tokens(images: Iterable[PromptImage], beam_width: int) -> int:
    """Return the maximum number of output tokens of a search whose prompt has images.

    Each beam sends all image files again for each token, because a node may no longer have the
    images in its caches.
    """
    num_bytes = sum(len(image.data) for image in images)
    return MAX_SEARCH_IMAGE_BYTES // max(num_bytes * beam_width, 1)


def _check_images(call: Call, beam_width: int) -> None:
    """Raise InvalidRequestError if a search would send nodes too many bytes of image files."""
    num_bytes = sum(len(image.data) for image in call.images)
    if num_bytes * beam_width > MAX_STEP_IMAGE_BYTES:
        most = f"must be at most {MAX_STEP_IMAGE_BYTES // num_bytes} with images of"
        raise InvalidRequestError("beam_width", f"{most} {num_bytes} bytes, got {beam_width}")
    most_tokens = most_search_tokens(call.images, beam_width)
    asked = call.sampling_params.max_tokens
    if asked > most_tokens:
        most = f"must be at most {most_tokens} with"
        problem = f"{most} {beam_width} beams and images of {num_bytes} bytes, got {asked}"
        raise InvalidRequestError("max_tokens", problem)


class BeamRun:
    """One beam search, whose outputs are read by one stream each.

    Args:
        call: the checked call; its timeout limits the whole search.
        params: the search's parameters.
        max_tokens: maximum number of output tokens that fit into the model's length.
        run: streams the tokens of a call, as `Dispatcher.run` does.
    """

    def __init__(self, call: Call, params: BeamSearchParams, max_tokens: int, run: Run) -> None:
        self._call, self._params, self._run = call, params, run
        self._max_tokens = min(params.max_tokens, max_tokens)
        self._search = BeamSearch(params, self._max_tokens)
        self._of_step = SamplingParams(max_tokens=1, temperature=0, logprobs=params.num_candidates)
        self._principal = _without_request_rate(call.terms.principal)
        self._first: Receipt | None = None  # receipt of the call that computed the prompt
        self._weights = set[str]()  # versions of the weights that computed the search's tokens
        self._task: asyncio.Task[list[Beam]] | None = None

    async def stream(self, place: int) -> AsyncGenerator[TextDelta, None]:
        """Yield the output at this place in the ranking (0: the best) as one piece.

        The first stream starts the search. Ending one stream ends the search for all streams.

        Raises the errors of `Dispatcher.run`.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._find())
        task = self._task
        try:
            beams = await asyncio.shield(task)
        finally:
            task.cancel()  # has no effect if the search has ended
            await asyncio.gather(task, return_exceptions=True)
        yield self._delta(place, beams[place])

    async def _find(self) -> list[Beam]:
        clock = asyncio.get_running_loop().time
        expires_at, num_steps = clock() + self._call.timeout_s, 0
        while not self._search.done:
            left_s = expires_at - clock()
            if left_s <= 0:
                raise DeadlineExceededError("the request's deadline passed")
            calls = [
                self._call_of(beam, f"step{num_steps}-{index}", left_s)
                for index, beam in enumerate(self._search.running)
            ]
            top_tokens = await self._run_all(calls)
            num_steps += 1
            if len(self._weights) > 1:  # an operator changed the nodes' weights
                self._begin_again()
            else:
                self._search.advance(top_tokens)
        return self._search.finished

    def _begin_again(self) -> None:
        """Forget all tokens: an output must not have tokens of two versions of the weights."""
        self._search = BeamSearch(self._params, self._max_tokens)
        self._weights.clear()
        self._first = None

    def _call_of(self, beam: Beam, name: str, timeout_s: float) -> Call:
        """Return the call that computes the most probable next tokens of a beam."""
        call = self._call
        token_ids = [*call.prompt_token_ids, *beam.token_ids]
        adapter = call.terms.adapter
        terms = dataclasses.replace(
            call.terms,
            received_at=time.perf_counter(),
            principal=self._principal,
            beams=None,
            # Pins of every beam would displace the tenant's pins of other prompts.
            pins=None if beam.token_ids else call.terms.pins,
        )
        return dataclasses.replace(
            call,
            request_id=f"{call.request_id}-{name}",
            prompt_token_ids=token_ids,
            sampling_params=self._of_step,
            terms=terms,
            timeout_s=timeout_s,
            source=None,
            hashes=PromptHashes(token_ids, call.cache_salt, adapter, call.image_spans, call.hashes),
        )

    async def _run_all(self, calls: Sequence[Call]) -> list[TopTokens]:
        """Run calls concurrently; the first error ends the others and is raised."""
        tasks = [asyncio.create_task(self._next_tokens(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_tokens(self, call: Call) -> TopTokens:
        top: TopTokens = ()
        async with contextlib.aclosing(self._run(call)) as outputs:
            async for output in outputs:
                top = output.logprobs[0].top if output.logprobs else top
                if output.receipt is not None:
                    self._first = self._first or output.receipt
                    self._weights.add(output.receipt.weights)
        return top

    def _delta(self, place: int, beam: Beam) -> TextDelta:
        """Return a finished beam as the only piece of an output."""
        first = self._first
        assert first is not None
        elapsed_s = time.perf_counter() - self._call.terms.received_at
        receipt = dataclasses.replace(
            first,
            num_prompt_tokens=len(self._call.prompt_token_ids),
            num_output_tokens=len(beam.token_ids),
            ttft_s=elapsed_s,
            total_s=elapsed_s,
            # the client gets its first token only when the search ends
            delivery_s=first.delivery_s + elapsed_s - first.ttft_s,
        )
        asks = self._call.sampling_params.logprobs is not None
        ended = beam.token_ids[-1] in self._params.end_token_ids
        return TextDelta(
            self._call.request_id,
            0,
            beam.token_ids,
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            receipt=receipt,
            logprobs=tuple(map(TokenLogprobs, beam.logprobs)) if asks else (),
            choice_index=place,
        )


def _without_request_rate(principal: Principal) -> Principal:
    """Return a principal without its limit on requests: a search counts as one request."""
    limits = dataclasses.replace(principal.limits, requests_per_minute=0.0)
    return dataclasses.replace(principal, limits=limits)
