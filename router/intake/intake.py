"""Intake: what every public API does with a request: check it, tokenize it, stream its text.

Takes and returns plain values: gRPC and HTTP are thin layers over the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import BatonError, InvalidRequestError, PromptTooLongError
from baton.api.outputs import FinishReason, TextDelta
from baton.api.prompt import (
    check_priority,
    check_prompt,
    check_prompt_logprobs,
    check_sampling_params,
    check_token_ids,
    draw_seed,
)
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.detokenizer import Detokenizer
from baton.text.grammar_trials import GrammarTrials
from baton.text.stop_strings import OutputText
from baton.text.tokenizer import Tokenizer
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.gate.rate_limits import Rate
from router.intake.answers.divided_text import DividedDelta, DividedText
from router.intake.cache_salts import CacheSalts
from router.intake.changing_lines import without_changing_lines
from router.intake.early_readers import EarlyReaders
from router.intake.grammar_checks import GrammarChecks
from router.intake.long_answers import LongAnswers
from router.intake.metrics import RouterMetrics
from router.intake.parsers.base import OutputParser
from router.intake.parsers.choice import OutputParsers
from router.intake.prompt_log import PromptLog
from router.intake.texts import ChatPrompt, Texts
from router.intake.usage import OwnPrompts, told

MAX_REQUEST_ID_CHARS = 128
MAX_SESSION_ID_CHARS = 256
MAX_CACHE_WORD_CHARS = 256
_DECODED_AT_ONCE = 1024  # tokens per piece: some milliseconds, with any vocabulary


Prompt = str | Sequence[int] | ChatPrompt


class Intake:
    """Turn requests into calls, and their tokens into text.

    Args:
        dispatcher: runs the calls.
        tokenizer: None for a checkpoint without one, which serves token ids only.
        vocab_size: the model's.
        default_timeout_s: for requests that come without a deadline.
        metrics: count every request; own ones if not given.
        cache_salts: decide which cached prompts a request may find; per tenant if not given.
        parsers: divide conversations' outputs; chosen by the chat template if not given.
        readers: templates of the processes that read requests; new processes if not given.
        sampling_defaults: defaults for HTTP requests that leave sampling parameters out.
        trusts_templates: whether a request may bring a chat template.
        cuts_changing_lines: whether lines that clients change in every prompt are removed.
        logs_prompts: whether prompts and outputs are logged.

    Attributes:
        tokenizer, cache_salts, parsers, sampling_defaults: see above.
        long_answers: builds response parts that contain many logprobs.
        is_starting: whether the worker processes were started and are not ready yet.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        default_timeout_s: float,
        metrics: RouterMetrics | None = None,
        cache_salts: CacheSalts | None = None,
        parsers: OutputParsers | None = None,
        readers: EarlyReaders | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        trusts_templates: bool = False,
        cuts_changing_lines: bool = True,
        logs_prompts: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self.tokenizer = tokenizer
        self._metrics = metrics or RouterMetrics()
        self.cache_salts = cache_salts or CacheSalts()
        self.long_answers = LongAnswers()
        self.is_starting = False
        self.parsers = parsers or OutputParsers(tokenizer)
        self.sampling_defaults = dict(sampling_defaults or {})
        self._trusts_templates = trusts_templates
        self._cuts_changing_lines = cuts_changing_lines
        self._prompt_log = PromptLog(tokenizer) if logs_prompts else None
        self._own_prompts = OwnPrompts(self.cache_salts)
        self._vocab_size = vocab_size
        self._default_timeout_s = default_timeout_s
        self._texts: Texts | None = None
        self._grammar_checks: GrammarChecks | None = None
        if tokenizer is not None:
            early = readers or EarlyReaders(tokenizer)
            self._texts = Texts(tokenizer, dispatcher.pool.max_model_len, early.texts)
            trials = GrammarTrials(tokenizer.folder, early=early.grammars)
            self._grammar_checks = GrammarChecks(trials)

    @property
    def num_open(self) -> int:
        """Number of requests that wait or are in progress."""
        return self._dispatcher.num_open

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens (prompt and output) of a request."""
        return self._dispatcher.pool.max_model_len

    def rates_of(self, principal: Principal) -> dict[str, Rate]:
        """Return what is left of a caller's rate limits; empty if there are none."""
        return self._dispatcher.admission.rates_of(principal)

    def check_key(self, principal: Principal) -> None:
        """Raise OverloadedError if the caller's limits allow no request now."""
        self._dispatcher.admission.check_key(principal)

    def start(self) -> None:
        """Start the workers for texts and grammars; `prepare` waits for them.

        Raises:
            NodeUnavailableError: a process cannot be started.
        """
        self.is_starting = True
        for part in (self._texts, self._grammar_checks):
            if part is not None:
                part.start()

    async def prepare(self) -> None:
        """Wait until the workers can read texts and grammars, and have each read a short one.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        if self._texts is not None:
            await self._texts.prepare()
        if self._grammar_checks is not None:
            await self._grammar_checks.prepare()
        self.is_starting = False

    def close(self) -> None:
        """End the processes that read texts and grammars, and the thread of long answers."""
        self.long_answers.close()
        for part in (self._texts, self._grammar_checks):
            if part is not None:
                part.close()

    async def accept(
        self, prompt: Prompt, params: SamplingParams, terms: Terms, request_id: str = ""
    ) -> Call:
        """Make a checked call of a request; raises InvalidRequestError for a client's mistakes.

        Args:
            prompt: text, token ids or a conversation.
            request_id: generated if empty.
        """
        with self._metrics.accepting():
            return await self._check(prompt, params, terms, request_id)

    async def _check(
        self, prompt: Prompt, params: SamplingParams, terms: Terms, request_id: str
    ) -> Call:
        principal = terms.principal
        self.check_key(principal)  # before anything costs time
        await self._dispatcher.turns.wait_for_turn()
        check_name("request_id", request_id, MAX_REQUEST_ID_CHARS)
        check_name("session_id", terms.session_id, MAX_SESSION_ID_CHARS)
        check_name("cache_salt", terms.cache_word, MAX_CACHE_WORD_CHARS)
        most_urgent = principal.limits.most_urgent_priority if principal.tenant else None
        check_priority(terms.priority, most_urgent)
        token_ids: list[int] | None = None
        if params.thinking is not None and not params.thinking.close_token_ids:
            token_ids = await self.tokenize(prompt, principal)
            thinking = self.parsers.asked_thinking(token_ids, params.thinking)
            params = dataclasses.replace(params, thinking=thinking)
        check_sampling_params(params, vocab_size=self._vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop", "this checkpoint has no tokenizer.json")
        if params.structured_output is not None:
            await self._check_structured_output(params.structured_output, principal)
        if params.seed is None:
            # Drawn here, so that both nodes, and retries, sample equally.
            params = params.with_seed(draw_seed())
        if token_ids is None:
            token_ids = await self.tokenize(prompt, principal)
        check_prompt(token_ids, vocab_size=self._vocab_size, max_model_len=self.max_model_len)
        check_prompt_logprobs(params, len(token_ids))
        timeout_s = terms.timeout_s
        return Call(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling_params=params,
            terms=terms,
            timeout_s=self._default_timeout_s if timeout_s is None else timeout_s,
            cache_salt=self.cache_salts.of(principal, terms.cache_word),
            is_chat=isinstance(prompt, ChatPrompt),
        )

    async def stream(
        self, call: Call, parser: OutputParser | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Run a call; ending the iteration early cancels it. Raises what the dispatcher does.

        Args:
            parser: divides the output. Deltas are then `DividedDelta`, and stop strings count in
                the answer only. None: stop strings count in the whole text.
        """
        text = self._output_text(call, parser)
        num_own = self._own_prompts.num_tokens(call)
        log = self._prompt_log
        output_log = None if log is None else log.log_prompt(call)
        try:
            with self._metrics.running() as record:
                async with contextlib.aclosing(self._dispatcher.run(call)) as outputs:
                    async for item in outputs:
                        delta = self._text_delta(call, item, text)
                        if delta.output_index == 0:
                            self._own_prompts.note(call)
                        if output_log is not None:
                            output_log.note(delta)
                        if delta.finish_reason is None:
                            if delta.output_index == 0:
                                self._dispatcher.note_handed_over(call)
                            yield delta
                            continue
                        # Here, because nodes do not see the text, in which stop strings count.
                        record.on_last_delta(delta)
                        assert delta.receipt is not None
                        receipt = told(delta.receipt, num_own)
                        yield msgspec.structs.replace(delta, receipt=receipt)
                        return
        except BatonError as error:
            if error.receipt is not None:
                error.receipt = told(error.receipt, num_own)
            raise

    async def tokenize(
        self,
        prompt: Prompt,
        principal: Principal = ANYBODY,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return a prompt's token ids; they are not checked against the model.

        Args:
            principal: whose prompt it is.
            add_special_tokens: whether a text gets the checkpoint's special tokens.

        Raises what `Texts.encode` does.
        """
        max_model_len = self.max_model_len
        if not isinstance(prompt, str | ChatPrompt):
            limit = max_model_len - 1
            if len(prompt) > limit:
                raise PromptTooLongError("prompt", len(prompt), limit)
            return list(prompt)
        if self.tokenizer is None or self._texts is None:
            raise InvalidRequestError(
                "prompt", "this checkpoint has no tokenizer.json: give token ids"
            )
        caller = principal.tenant
        if isinstance(prompt, str):
            return await self._texts.encode(
                prompt,
                max_model_len=max_model_len,
                caller=caller,
                add_special_tokens=add_special_tokens,
            )
        if not prompt.messages:
            raise InvalidRequestError("chat", "must have at least 1 message, got 0")
        if prompt.template is not None and not self._trusts_templates:
            raise InvalidRequestError(
                "chat_template",
                "is the operator's choice here, not a request's (--trust-request-chat-template)",
            )
        if self._cuts_changing_lines:
            messages = without_changing_lines(list(prompt.messages))
            prompt = dataclasses.replace(prompt, messages=messages)
        return await self._texts.encode_chat(prompt, max_model_len=max_model_len, caller=caller)

    async def tokenize_only(
        self, prompt: Prompt, principal: Principal, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return a prompt's token ids, and charge the caller's rate limits as for a request.

        Raises OverloadedError, and what `tokenize` does.
        """
        admission = self._dispatcher.admission
        admission.charge(principal)
        token_ids = await self.tokenize(prompt, principal, add_special_tokens=add_special_tokens)
        admission.charge_tokens(principal, len(token_ids) - 1)
        return token_ids

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a prompt's token ids; other tasks run in between.

        Raises InvalidRequestError for unknown ids, too many ids, or a checkpoint without tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("tokens", "this checkpoint has no tokenizer.json")
        if len(token_ids) > self.max_model_len:
            raise InvalidRequestError(
                "tokens", f"must have at most {self.max_model_len}, got {len(token_ids)}"
            )
        check_token_ids("tokens", token_ids, self._vocab_size)
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
        texts = []
        for start in range(0, len(token_ids), _DECODED_AT_ONCE):
            texts.append(detokenizer.push(token_ids[start : start + _DECODED_AT_ONCE]))
            await asyncio.sleep(0)
        return "".join([*texts, detokenizer.push((), last=True)])

    def _output_text(
        self, call: Call, parser: OutputParser | None
    ) -> OutputText | DividedText | None:
        params, options = call.sampling_params, call.terms.text_options
        if self.tokenizer is None:
            return None
        if parser is None:
            return OutputText(self.tokenizer, params, options)
        return DividedText(self.tokenizer, params, options, parser)

    def _text_delta(
        self, call: Call, output: TextDelta, text: OutputText | DividedText | None
    ) -> TextDelta:
        """Return an output with its text added; a stop string ends the output."""
        finish_reason, receipt = output.finish_reason, output.receipt
        token_ids = output.token_ids
        piece = ""
        if text is not None:
            piece = text.push(
                token_ids,
                last=finish_reason is not None,
                ended_by_token=finish_reason is FinishReason.STOP,
            )
        if text is not None and text.stopped:
            finish_reason = FinishReason.STOP
            token_ids = token_ids[: text.num_tokens - output.output_index]
            receipt = dataclasses.replace(
                receipt or self._dispatcher.receipt(call),
                num_output_tokens=text.num_tokens,
            )
        made: type[TextDelta] = TextDelta
        parts: dict[str, Any] = {}
        if isinstance(text, DividedText):
            made, parts = DividedDelta, {"parts": tuple(text.parts)}
        return made(
            output.request_id,
            output.output_index,
            token_ids,
            piece,
            finish_reason,
            receipt,
            output.logprobs[: len(token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            stop_string=text.stop_string if text is not None else None,
            **parts,
        )

    async def _check_structured_output(
        self, structured_output: StructuredOutput, principal: Principal
    ) -> None:
        if self._grammar_checks is None:
            raise InvalidRequestError("structured_output", "this checkpoint has no tokenizer.json")
        await self._grammar_checks.check(structured_output, caller=principal.tenant)


def check_name(field: str, name: str, limit: int) -> None:
    """Raise InvalidRequestError if a client's name is too long or not printable."""
    if len(name) > limit:
        raise InvalidRequestError(field, f"must have at most {limit} characters, got {len(name)}")
    # (Bytes of HTTP headers that are not UTF-8 become surrogates, which are not printable.)
    if not name.isprintable():
        raise InvalidRequestError(field, f"must have printable characters only, got {name!a}")
