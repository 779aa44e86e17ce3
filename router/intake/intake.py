"""Intake: the part of a request that all public APIs share: check, tokenize, stream its text.

gRPC and HTTP convert their messages to the plain values that the intake takes and returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.outputs import TextDelta
from baton.api.prompt import (
    check_name,
    check_priority,
    check_prompt,
    check_prompt_logprobs,
    check_sampling_params,
    draw_seed,
)
from baton.api.sampling_params import SamplingParams
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.gate.admission import Admission
from router.intake.abilities import Abilities
from router.intake.answers.answers import Answers
from router.intake.metrics import RouterMetrics
from router.intake.parsers.base import OutputParser
from router.intake.prompt_reader import Prompt, PromptReader, ReadPrompt, is_chat

MAX_REQUEST_ID_CHARS = 128
MAX_SESSION_ID_CHARS = 256
MAX_CACHE_WORD_CHARS = 256


class Intake:
    """Turns requests for one base model into calls, and the calls' tokens into text.

    Args:
        dispatcher: runs the calls.
        reader: tokenizes prompts in worker processes.
        abilities: what the model does beside sampling tokens.
        answers: makes the answers that clients get.
        vocab_size: size of the model's vocabulary.
        default_timeout_s: seconds until the deadline of requests that set none.
        metrics: counts every request; None: new counters.
        sampling_defaults: values of sampling parameters that HTTP requests leave out.

    Attributes:
        reader, abilities, answers, sampling_defaults: see the arguments.
        tokenizer: the checkpoint's tokenizer; None: clients can only send and get token ids.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        reader: PromptReader,
        abilities: Abilities,
        answers: Answers,
        *,
        vocab_size: int,
        default_timeout_s: float,
        metrics: RouterMetrics | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self.reader, self.abilities, self.answers = reader, abilities, answers
        self.tokenizer = reader.tokenizer
        self._metrics = metrics or RouterMetrics()
        self.sampling_defaults = dict(sampling_defaults or {})
        self._vocab_size = vocab_size
        self._default_timeout_s = default_timeout_s

    @property
    def num_open(self) -> int:
        """Number of requests that wait or are in progress."""
        return self._dispatcher.num_open

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output of a request."""
        return self.abilities.max_model_len

    @property
    def admission(self) -> Admission:
        """The gate, which also knows what is left of callers' limits."""
        return self._dispatcher.admission

    def close(self) -> None:
        """End the processes that read texts and grammars, and the thread of long answers."""
        self.answers.close()
        self.reader.close()

    async def accept(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms,
        request_id: str = "",
        *,
        generates: bool = True,
    ) -> Call:
        """Check a request, tokenize its prompt, and return its call.

        Raises InvalidRequestError for a client's mistakes.

        Args:
            prompt: text, token ids or a conversation.
            request_id: id of the request; empty: generate one.
            generates: whether the request asks for text; False: for embeddings, scores or labels.
        """
        with self._metrics.accepting():
            if generates:
                self.abilities.check_generates()
            return await self._check(prompt, params, terms, request_id)

    async def _check(
        self, prompt: Prompt, params: SamplingParams, terms: Terms, request_id: str
    ) -> Call:
        principal = terms.principal
        self.check_terms(terms, request_id)  # cheap checks come before expensive work
        await self._dispatcher.turns.wait_for_turn()
        read: ReadPrompt | None = None
        if params.thinking is not None and not params.thinking.close_token_ids:
            read = await self.reader.read(prompt, principal, terms.cache_word)
            thinking = self.abilities.parsers.asked_thinking(read.token_ids, params.thinking)
            params = dataclasses.replace(params, thinking=thinking)
        check_sampling_params(params, vocab_size=self._vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop", "this checkpoint has no tokenizer.json")
        if params.structured_output is not None:
            await self.reader.check_structured_output(params.structured_output, principal)
        if params.seed is None:
            # The seed is drawn here, so that both nodes and all attempts sample alike.
            params = params.with_seed(draw_seed())
        if read is None:
            read = await self.reader.read(prompt, principal, terms.cache_word)
        token_ids = read.token_ids
        check_prompt(token_ids, vocab_size=self._vocab_size, max_model_len=self.max_model_len)
        check_prompt_logprobs(params, len(token_ids))
        timeout_s = terms.timeout_s
        return Call(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling_params=params,
            terms=terms,
            timeout_s=self._default_timeout_s if timeout_s is None else timeout_s,
            cache_salt=self.answers.salts.of(principal, terms.cache_word),
            is_chat=is_chat(prompt),
            images=read.images,
        )

    def check_terms(self, terms: Terms, request_id: str = "") -> None:
        """Raise an error if a client's terms are wrong, or its limits allow no request now.

        Counts no request. Raises InvalidRequestError or OverloadedError.
        """
        principal = terms.principal
        self.admission.check_key(principal)
        check_name("request_id", request_id, MAX_REQUEST_ID_CHARS)
        check_name("session_id", terms.session_id, MAX_SESSION_ID_CHARS)
        check_name("cache_salt", terms.cache_word, MAX_CACHE_WORD_CHARS)
        most_urgent = principal.limits.most_urgent_priority if principal.tenant else None
        check_priority(terms.priority, most_urgent)

    async def stream(
        self, call: Call, parser: OutputParser | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Run a call and yield its output; ending the iteration cancels the call.

        Raises the errors of `Dispatcher.run`.

        Args:
            parser: divides the output into parts; see `CallText`.
        """
        answer = self.answers.open_answer(call, parser, lambda: self._dispatcher.receipt(call))
        try:
            with self._metrics.running() as record:
                source = self._dispatcher.run(call) if call.source is None else call.source()
                async with contextlib.aclosing(source) as outputs:
                    async for item in outputs:
                        delta = answer.add(item)
                        if delta.finish_reason is None:
                            if delta.output_index == 0 and call.source is None:
                                self._dispatcher.note_ttft(call)
                            yield delta
                            continue
                        # The outcome is noted here, because nodes know no stop strings.
                        record.on_last_delta(delta)
                        assert delta.receipt is not None
                        receipt = answer.shown(delta.receipt)
                        yield msgspec.structs.replace(delta, receipt=receipt)
                        return
        except BatonError as error:
            if error.receipt is not None:
                error.receipt = answer.shown(error.receipt)
            raise
