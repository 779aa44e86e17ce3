"""`POST /v1/completions`: texts or token ids in, their continuations out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from baton.api.errors import InvalidRequestError
from baton.api.outputs import TextDelta
from router.api.http.errors import REQUEST_ID
from router.api.http.exchange import (
    ENTRY,
    PRINCIPAL,
    SERVED,
    Exchange,
    HttpOptions,
    check_num_returned,
    check_stream,
    read_body,
    terms_of,
)
from router.api.http.logprobs import TextOffsets, TokenTexts, as_many, joined, with_top
from router.api.http.responses import CompletionChoice, CompletionLogprobs
from router.api.http.sampling import as_client_wrote, sampling_params
from router.api.http.schema import CompletionRequest
from router.calls.call import Call
from router.intake.choices import accept_choices, check_num_outputs
from router.intake.intake import Intake
from router.intake.parsers.base import OutputParser

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
# Maximum number of characters of all echoed prompts in one response. A client sends a prompt once,
# but each of up to a hundred outputs repeats it.
MAX_ECHOED_CHARS = 2**23

_Echo = tuple[list[int], str]  # a prompt's token ids and text


class CompletionDialect:
    """Writes the outputs of one completions request.

    Args:
        calls: one call per output.
        echoes: the token ids and text of each output's prompt; empty if prompts are not echoed.
    """

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        calls: Sequence[Call],
        echoes: Sequence[_Echo],
        texts: TokenTexts,
    ) -> None:
        self._body = body
        self._calls = calls
        self._echoes = list(echoes)
        self._texts = texts
        shows_special = body.skip_special_tokens is False
        self._offsets = [
            TextOffsets(texts, len(echoed), shows_special=shows_special) for _, echoed in echoes
        ]

    def parser(self, index: int) -> OutputParser | None:
        return None

    def chunk(self, index: int, delta: TextDelta) -> CompletionChoice:
        return self.choice(index, delta)

    def on_delta(self, index: int, delta: TextDelta) -> None:
        pass  # nothing to read: the joined delta has the whole text

    def choice(self, index: int, delta: TextDelta) -> CompletionChoice:
        echoed_ids, echoed_text = self._echoes[index]
        self._echoes[index] = ([], "")  # only the first chunk of an output repeats the prompt
        reason = delta.finish_reason
        choice = CompletionChoice(
            index,
            echoed_text + delta.text,
            self._logprobs(index, (echoed_ids, echoed_text), delta),
            reason.value if reason is not None else None,
        )
        token_ids = self._calls[index].prompt_token_ids
        if self._body.return_token_ids and delta.output_index == 0:
            choice.prompt_token_ids = token_ids
        if self._body.prompt_logprobs is not None:
            num_top = self._body.prompt_logprobs
            choice.prompt_logprobs = self._texts.prompt(
                token_ids, with_top(as_many(delta.prompt_logprobs, len(token_ids)), num_top)
            )
        return choice

    def _logprobs(self, index: int, echo: _Echo, delta: TextDelta) -> CompletionLogprobs | None:
        echoed_ids, echoed_text = echo
        num_top = self._body.logprobs
        if num_top is None or not (echoed_ids or delta.token_ids):
            return None
        texts = self._texts
        own = as_many(delta.logprobs, len(delta.token_ids))
        found = texts.completion(delta.token_ids, own, self._offsets[index])
        if not echoed_ids:
            return found
        of_prompt = with_top(as_many(delta.prompt_logprobs, len(echoed_ids)), num_top)
        offsets = TextOffsets(texts, text=echoed_text)
        return joined(texts.completion(echoed_ids, of_prompt, offsets), found)


async def completions(request: web.Request, options: HttpOptions) -> web.StreamResponse:
    """Answer a completions request; `web.middleware` turns raised errors into responses."""
    received_at = request[ENTRY].began_at
    body = await read_body(request, CompletionRequest, options)
    intake, named = request[SERVED].intake, request[SERVED].defaults
    check_stream(body)
    # ``max_tokens=0`` asks for the prompt's logprobs only. The engine samples at least one token,
    # which the response leaves out.
    scores_only = bool(body.echo) and body.max_tokens == 0
    max_tokens = named.num_tokens(body.max_tokens, DEFAULT_MAX_TOKENS)
    params = sampling_params(
        body,
        max_tokens=1 if scores_only else max_tokens,
        defaults={**intake.sampling_defaults, **named.sampling},
        logprobs=body.logprobs,
        prompt_logprobs=_num_prompt_logprobs(body),
    )
    if body.suffix:
        raise InvalidRequestError("suffix", "is not supported")
    given = _prompts(body.prompt)
    check_num_outputs("prompt", len(given) * params.n)
    prompts = []
    for prompt in given:
        prompts.append(
            await intake.reader.tokenize(
                prompt,
                request[PRINCIPAL],
                add_special_tokens=body.add_special_tokens is not False,
            )
        )
        # Let other tasks run, because tokenizing many prompts takes long.
        await asyncio.sleep(0)
    terms = terms_of(request, body, received_at)
    with as_client_wrote(body):
        calls = await accept_choices(intake, prompts, params, terms, request[REQUEST_ID])
    echoes: list[_Echo] = [([], "")] * len(calls)
    if body.echo:
        echoes = await _echoes(intake, prompts, given, body)
    if body.return_token_ids:
        check_num_returned(sum(map(len, prompts)) * params.n)
    return await Exchange(
        request=request,
        intake=intake,
        body=body,
        calls=calls,
        num_choices=params.n,
        prompt_only=scores_only,
        dialect=CompletionDialect(body, calls, echoes, TokenTexts(intake.tokenizer)),
    ).respond()


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many logprobs per prompt token the request asks for; None: no logprobs."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((num for num in asked if num is not None), default=None)


def _prompts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return a list of prompts from any form that OpenAI allows; raises InvalidRequestError."""
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
    intake: Intake,
    prompts: list[list[int]],
    given: Sequence[str | list[int]],
    body: CompletionRequest,
) -> list[_Echo]:
    """Return the prompt that each output repeats; raises InvalidRequestError for long prompts."""
    echoes: list[_Echo] = []
    n = body.n or 1
    skips_special = body.skip_special_tokens is not False
    num_chars = 0
    for token_ids, prompt in zip(prompts, given, strict=True):
        text = prompt if isinstance(prompt, str) else ""
        if not isinstance(prompt, str) and intake.tokenizer is not None:
            text = await intake.reader.decode(token_ids, skip_special_tokens=skips_special)
        num_chars += len(text) * n
        if num_chars > MAX_ECHOED_CHARS:
            raise InvalidRequestError(
                "echo", f"prompts of all outputs must have at most {MAX_ECHOED_CHARS} characters"
            )
        echoes += [(token_ids, text)] * n
    return echoes
