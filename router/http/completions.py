"""`POST /v1/completions`: texts or token ids in, their continuations out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aiohttp import web

from baton.errors import InvalidRequestError
from baton.outputs import TextDelta, TokenLogprobs
from router.choices import accept_choices, check_num_outputs
from router.http.exchange import PRINCIPAL, Exchange, generation_request, read_body
from router.http.logprobs import TokenTexts
from router.http.responses import CompletionChoice, CompletionLogprobs
from router.http.sampling import as_client_wrote, sampling_params
from router.http.schema import CompletionRequest
from router.intake import Intake

DEFAULT_MAX_TOKENS = 16  # OpenAI's
# Of prompts in a response, once for each output: a prompt comes once, and could go out a hundred
# times.
MAX_ECHOED_CHARS = 2**23

_Echo = tuple[list[int], str]  # a prompt's token ids and text


class CompletionDialect:
    """Completions of one request.

    Args:
        echoes: per output, what comes before it: its prompt's token ids and text; or nothing.
        texts: None when no logprobs are wanted.
    """

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, echoes: Sequence[_Echo], texts: TokenTexts | None) -> None:
        self._echoes = list(echoes)
        self._texts = texts
        self._offsets = [0] * len(echoes)  # of the next token, in characters

    def chunk(self, index: int, delta: TextDelta) -> CompletionChoice | None:
        choice = self.choice(index, delta)
        says = choice.text or choice.logprobs is not None or choice.finish_reason is not None
        return choice if says else None

    def choice(self, index: int, delta: TextDelta) -> CompletionChoice:
        echoed_ids, echoed_text = self._echoes[index]
        self._echoes[index] = ([], "")  # once is enough
        reason = delta.finish_reason
        return CompletionChoice(
            index,
            echoed_text + delta.text,
            self._logprobs(index, echoed_ids, delta),
            reason.value if reason is not None else None,
        )

    def _logprobs(
        self, index: int, echoed_ids: list[int], delta: TextDelta
    ) -> CompletionLogprobs | None:
        if self._texts is None or not delta.token_ids:
            return None
        # (A node may give none.)
        echoed = _as_many(delta.prompt_logprobs if echoed_ids else (), len(echoed_ids))
        own = _as_many(delta.logprobs, len(delta.token_ids))
        found, self._offsets[index] = self._texts.completion(
            [*echoed_ids, *delta.token_ids], [*echoed, *own], self._offsets[index]
        )
        return found


def _as_many(
    logprobs: Sequence[TokenLogprobs | None], num_tokens: int
) -> Sequence[TokenLogprobs | None]:
    return logprobs if len(logprobs) == num_tokens else [None] * num_tokens


async def completions(request: web.Request, intake: Intake, model_name: str) -> web.StreamResponse:
    """Raises what `web.middleware` turns into a response."""
    received_at = time.perf_counter()
    body = await read_body(request, CompletionRequest, model_name=model_name)
    params = sampling_params(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    _check_unsupported(body, params.n)
    given = _prompts(body.prompt)
    check_num_outputs("prompt", len(given) * params.n)
    prompts = []
    for prompt in given:
        prompts.append(await intake.tokenize(prompt, request[PRINCIPAL]))
        await asyncio.sleep(0)  # many prompts take long: others' tokens come in between
    generation = generation_request(request, body, prompts[0], params, received_at)
    with as_client_wrote(body):
        calls = await accept_choices(intake, generation, prompts[1:])
    echoes: list[_Echo] = [([], "")] * len(calls)
    if body.echo:
        echoes = await _echoes(intake, prompts, given, params.n)
    return await Exchange(
        request=request,
        intake=intake,
        body=body,
        calls=calls,
        num_choices=params.n,
        dialect=CompletionDialect(
            echoes,
            TokenTexts(intake.tokenizer) if body.logprobs is not None else None,
        ),
    ).respond()


def _check_unsupported(body: CompletionRequest, num: int) -> None:
    if body.best_of not in (None, num):
        raise InvalidRequestError("best_of", f"must be n ({num}) or absent, got {body.best_of}")
    if body.suffix:
        raise InvalidRequestError("suffix", "is not supported")


def _prompts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of all forms that OpenAI's API takes; raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt", "must have at least 1 prompt, got 0")
    token_ids = [item for item in given if isinstance(item, int)]
    if len(token_ids) == len(given):
        return [token_ids]
    prompts = [item for item in given if not isinstance(item, int)]
    if len({type(item) for item in given}) > 1:
        raise InvalidRequestError("prompt", "must be all texts, all token ids or all lists of them")
    return prompts


async def _echoes(
    intake: Intake, prompts: list[list[int]], given: Sequence[str | list[int]], n: int
) -> list[_Echo]:
    """What comes before each output; raises InvalidRequestError when it is too much."""
    echoes: list[_Echo] = []
    num_chars = 0
    for token_ids, prompt in zip(prompts, given, strict=True):
        text = prompt if isinstance(prompt, str) else ""
        if not isinstance(prompt, str) and intake.tokenizer is not None:
            text = intake.tokenizer.decode(token_ids)
            await asyncio.sleep(0)  # a long prompt takes a twentieth of a second
        num_chars += len(text) * n
        if num_chars > MAX_ECHOED_CHARS:
            raise InvalidRequestError(
                "echo", f"prompts of all outputs must have at most {MAX_ECHOED_CHARS} characters"
            )
        echoes += [(token_ids, text)] * n
    return echoes
