"""LLM: the engine in one process, no network. The reference that the split system must equal.

from engine import LLM
LLM("examples/demo_model").generate(["def read_config(path):"])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.engine_config import EngineConfig
from baton.errors import EngineDeadError, InvalidRequestError
from baton.model_folder import find_model_folder
from baton.outputs import Completion, FinishReason, RequestOutput, TextDelta
from baton.prompt import check_prompt, check_sampling_params, draw_seed
from baton.sampling_params import SamplingParams
from baton.tokenizer import Tokenizer
from engine.answer import Answer
from engine.crash_dump import dump_crash
from engine.engine import Engine
from engine.request import Request

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str]]


class LLM:
    """Completes prompts offline.

    Args:
        model: a folder in Hugging Face format, or a hub id.
        options: fields of EngineConfig, such as ``dtype="float32"``.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: an option is wrong.
    """

    def __init__(self, model: str, **options: Any) -> None:
        folder = find_model_folder(str(model))
        self.engine = Engine(folder, EngineConfig(**options))
        self.tokenizer = Tokenizer(folder) if Tokenizer.exists_in(folder) else None
        self._answers: dict[str, Answer] = {}  # of requests in progress
        self._num_requests = 0
        self._dead = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt.

        Args:
            prompts: texts or lists of token ids; one or many.
            sampling_params: for all prompts, or one per prompt.
            progress: show a progress bar on standard error.

        Returns:
            Completions in prompt order; ``text`` is empty for a checkpoint without a tokenizer.
            One that ends with ``ABORT`` had no token left that its structured output and its bans
            both allow.

        Raises:
            InvalidRequestError: a prompt or a parameter is outside its limit; nothing was run.
        """
        prompt_list = _as_list(prompts)
        params_list = _one_per_prompt(sampling_params, len(prompt_list))
        requests = [
            self._make_request(prompt, params)
            for prompt, params in zip(prompt_list, params_list, strict=True)
        ]
        answers = [self._begin(request) for request in requests]
        with _progress_bar(len(answers), shown=progress) as advance:
            while self.engine.has_work:
                advance(self._step())
        return [answer.completion() for answer in answers]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer each conversation, by the checkpoint's chat template; as `generate` otherwise.

        Args:
            conversations: lists of messages with a ``role`` and a ``content``; one or many.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("chat", "this checkpoint has no tokenizer.json")
        many = [conversations] if _is_conversation(conversations) else conversations
        prompts = [self.tokenizer.encode_chat(list(messages)) for messages in many]  # type: ignore[arg-type]  # checked
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Complete one prompt, piece by piece; leaving the loop ends the request.

        Raises InvalidRequestError, when the iteration begins.
        """
        request = self._make_request(prompt, sampling_params or SamplingParams())
        answer = self._begin(request, streams=True)
        try:
            while not answer.ended:
                self._step()
                yield from answer.take_unread()
            yield from answer.take_unread()  # what came while somebody else made the last steps
        finally:
            self._end(request.request_id)

    def _begin(self, request: Request, *, streams: bool = False) -> Answer:
        answer = Answer(request, self.tokenizer, streams=streams)
        self._answers[request.request_id] = answer
        self.engine.add(request)
        return answer

    def _end(self, request_id: str) -> None:
        """Forget a request, and end it where a stop string or its reader did so first."""
        self._answers.pop(request_id, None)
        self.engine.abort(request_id)

    def _step(self) -> int:
        """A step, and its outputs to their answers; returns how many requests ended.

        What nobody expected is dumped to a file and ends the engine.
        """
        if self._dead:
            raise EngineDeadError("the engine has failed before; make a new LLM")
        try:
            result = self.engine.step()
        except Exception as error:  # the loop's top
            self._dead = True
            path = dump_crash(self.engine, error)
            raise EngineDeadError(f"the engine cannot continue: {error}; see {path}") from error
        num_ended = self._end_failed()
        for output in result.outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:  # somebody gave it to the engine directly
                continue
            answer.take(output)
            if answer.ended:
                self._end(output.request_id)
                num_ended += 1
        return num_ended

    def _end_failed(self) -> int:
        """Abort answers that no token can go on with; returns how many."""
        num_ended = 0
        for request_id, problem in self.engine.take_failures():
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                logger.warning("%s ends: %s", request_id, problem)
                index = answer.request.num_output_tokens
                answer.take(RequestOutput(request_id, index, (), FinishReason.ABORT))
                num_ended += 1
        return num_ended

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        token_ids = self._tokenize(prompt)
        engine = self.engine
        check_prompt(
            token_ids,
            vocab_size=engine.model_config.vocab_size,
            max_model_len=engine.max_model_len,
        )
        check_sampling_params(params, vocab_size=engine.model_config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop", "this checkpoint has no tokenizer.json")
        grammar = self.engine.compile_grammar(params)
        self._num_requests += 1
        return Request.create(
            f"offline-{self._num_requests}",
            token_ids,
            params,
            seed=draw_seed() if params.seed is None else params.seed,
            eos_token_ids=engine.eos_token_ids,
            max_model_len=engine.max_model_len,
            grammar=grammar,
        )

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token_id) for token_id in prompt]
        if self.tokenizer is None:
            raise InvalidRequestError(
                "prompt", "this checkpoint has no tokenizer.json: give token ids"
            )
        return self.tokenizer.encode(prompt)


def _is_conversation(value: object) -> bool:
    """Whether this is one conversation: a list of messages, not of lists."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, or nothing; gives what advances it."""
    if not shown:
        yield lambda num: None
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda num: bar.advance(task, num)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # a single list of token ids
    return list(prompts)  # type: ignore[arg-type]  # a list of prompts


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            "sampling_params", f"must be one or {num_prompts} (one per prompt), got {len(params)}"
        )
    return list(params)
