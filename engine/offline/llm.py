"""LLM: the engine in one process, without a network.

A prefill node and a decode node together must give the same tokens as this class.

from baton import LLM
LLM("examples/demo_model").generate(["def read_config(path):"])
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from baton.adapters.digest import AdapterDigest
from baton.api.beam_search import BeamCompletion, BeamSearchParams, EarlyStopping
from baton.api.changes import SleepLevel, WhenOpen, read_choice
from baton.api.errors import EngineDeadError, InvalidRequestError
from baton.api.outputs import Completion, TextDelta
from baton.api.pooling import Classification, Embedding, Score
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.model_folder import find_model_folder
from baton.checkpoint.new_weights import NewWeights
from baton.checkpoint.pooling.choices import AUTO
from baton.checkpoint.pooling.setup import PoolingSetup, read_setup
from baton.engine_config import MAX_BATCHED_TOKENS, EngineConfig
from baton.kv.pins import PinTerms, check_ttl
from baton.text.tokenizer import Tokenizer
from engine.core.metrics import EngineMetrics
from engine.core.request import Request
from engine.crash_dump import dump_crash
from engine.make_engine import make_engine
from engine.offline.answer import Answer
from engine.offline.beams import OfflineBeams
from engine.offline.hints import name_of, terms_of
from engine.offline.named_adapters import NamedAdapters
from engine.offline.pooling import OfflinePooling, PooledAnswer, pairs_of
from engine.offline.progress_bar import progress_bar
from engine.offline.prompts import (
    Conversation,
    Prompt,
    ReadPrompt,
    as_list,
    name_per_prompt,
    params_per_prompt,
    priority_per_prompt,
    without_images,
)
from engine.offline.request_maker import RequestMaker
from engine.offline.weights_source import WeightsSource, open_source
from engine.weights import ServedWeights

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_OWNER = PinTerms().owner  # there are no tenants in one process


class LLM:
    """Completes prompts in this process, without a server.

    Args:
        model: a folder in Hugging Face format, a GGUF file, or a hub id.
        chat_template: path of a Jinja file that `chat` uses instead of the checkpoint's template.
        adapters: LoRA adapters to load, by name; see `load_adapter`.
        pooling: how `embed`, `score` and `classify` pool hidden states: auto (as the checkpoint's
            files say), none, last, mean, cls or rerank.
        options: fields of EngineConfig, such as ``dtype="float32"``; paths may be `Path` objects.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: an option is wrong.
        AdapterError: an adapter's files are malformed, or do not fit the model.
    """

    def __init__(
        self,
        model: str,
        *,
        chat_template: Any = None,
        adapters: Any = MappingProxyType({}),
        pooling: Any = AUTO,
        **options: Any,
    ) -> None:
        options = {name: _without_path(value) for name, value in options.items()}
        folder = find_model_folder(str(model))
        setup = read_setup(folder, pooling)
        template_file = None if chat_template is None else Path(chat_template).expanduser()
        self.tokenizer = (
            Tokenizer(folder, chat_template=template_file) if Tokenizer.exists_in(folder) else None
        )
        # Offline, only throughput matters, so prompts need not be cut into chunks, which would keep
        # decode steps short.
        options.setdefault("prefill_tokens_beside_decodes", MAX_BATCHED_TOKENS)
        if not isinstance(adapters, Mapping):
            problem = f"must be a mapping of names to sources, got {type(adapters).__name__}"
            raise InvalidRequestError("adapters", problem)
        if adapters:
            options["max_adapters"] = max(len(adapters), options.get("max_adapters", 0))
        self.engine = make_engine(folder, EngineConfig(**options))
        self.served_weights = ServedWeights(self.engine, folder)
        self.is_paused = False
        self.named_adapters = NamedAdapters(self.engine.adapters)
        try:
            for name, adapter_folder in adapters.items():
                self.load_adapter(name, adapter_folder)
        except BaseException:
            self.engine.close()
            raise
        # Answers of open requests, by request id.
        self._answers: dict[str, Answer | PooledAnswer] = {}
        self._maker = RequestMaker(self.engine, self.tokenizer, setup)
        self._pooling = OfflinePooling(self.engine, setup, self.tokenizer, self._run_pooled)
        self._dead = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        pin_s: float = 0.0,
        session: str | Sequence[str] = "",
        progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt, and wait until all are complete.

        Args:
            prompts: texts, lists of token ids, or prompts with images (`ImagePrompt`); one or many.
            sampling_params: parameters for all prompts, or one set per prompt.
            adapter: name of a loaded adapter, for all prompts or one per prompt; empty: none.
            priority: priority of all prompts, or one per prompt: requests with smaller values run
                first. Needs ``scheduling_policy="priority"``. Priorities do not change any token.
            pin_s: seconds for which prompts and answers stay in the prefix cache, as far as
                ``pin_share`` allows; 0: as long as there is room.
            session: your name for the conversation of all prompts, or one name per prompt, for
                `prefetch` and `drop_pins`; empty: none.
            progress: show a progress bar on standard error.

        Returns:
            Completions in the order of prompts; the outputs of one prompt (``SamplingParams.n``)
            are adjacent. ``text`` is empty for a checkpoint without a tokenizer. A completion ends
            with ``ABORT`` if its structured output and its banned tokens allow no further token.

        Raises:
            InvalidRequestError: a prompt or a parameter is outside its limit; nothing was run.
        """
        self._check_awake()
        prompt_list = as_list(prompts)
        params_list = params_per_prompt(sampling_params, len(prompt_list))
        names = name_per_prompt("adapter", adapter, len(prompt_list))
        sessions = name_per_prompt("session", session, len(prompt_list))
        hints = [terms_of(pin_s, one) for one in sessions]
        priorities = priority_per_prompt(priority, len(prompt_list))
        self.named_adapters.load_again(set(names))
        choices = [
            self._make_choices(prompt, params, name, priority)
            for prompt, params, name, priority in zip(
                prompt_list, params_list, names, priorities, strict=True
            )
        ]
        return [one.completion() for one in self._run(choices, hints, progress=progress)]

    def _run(
        self,
        choices: Sequence[list[Request]],
        hints: Sequence[PinTerms | None] = (),
        *,
        progress: bool = False,
    ) -> list[Answer]:
        """Run the requests of prompts until all have ended; return their answers in order.

        Args:
            hints: what to keep of each prompt; empty: nothing.
        """
        hints = hints or [None] * len(choices)
        answers = [
            answer
            for requests, terms in zip(choices, hints, strict=True)
            for answer in self._begin(requests, terms)
        ]
        with progress_bar(len(answers), shown=progress) as advance:
            while self.engine.has_work or self.engine.features.is_awaited:
                advance(self._step())
        return answers

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        pin_s: float = 0.0,
        session: str | Sequence[str] = "",
        progress: bool = False,
    ) -> list[Completion]:
        """Answer each conversation, using the checkpoint's chat template; otherwise like
        `generate`.

        Args:
            conversations: lists of messages with a ``role`` and a ``content``; one or many. A
                content may be a list of parts, some of them images (`take_images`).
        """
        prompts = self.encode_chats(conversations)
        return self.generate(
            prompts,
            sampling_params,
            adapter=adapter,
            priority=priority,
            pin_s=pin_s,
            session=session,
            progress=progress,
        )

    def encode_chats(self, conversations: Conversation | Sequence[Conversation]) -> list[Prompt]:
        """Return the prompt of each conversation, made by the checkpoint's chat template.

        Raises InvalidRequestError if the checkpoint has no tokenizer.
        """
        return self._maker.encode_chats(conversations)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        adapter: str = "",
    ) -> list[Embedding]:
        """Return the embedding of each input.

        Args:
            inputs: texts or lists of token ids; one or many.
            prompt_name: name of one of the checkpoint's prompts (such as ``query``), which is put
                before each text; None: the default prompt; empty: no prompt.
            dimensions: number of values that each embedding is truncated to; truncated embeddings
                are normalized again.
            adapter: name of a loaded adapter.

        Raises:
            InvalidRequestError: the model does not make embeddings, or an input is outside its
                limit.
        """
        digest = self.adapter_digest(adapter)
        return self._pooling.embed(
            without_images(inputs), digest, prompt_name=prompt_name, dimensions=dimensions
        )

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str = "",
        adapter: str = "",
    ) -> list[Score]:
        """Return the relevance of each document to its query; one query may serve all documents.

        A reranker, or a classification head with one label, reads query and document together. For
        an embedding model, a score is the cosine of the two embeddings.

        Args:
            instruction: description of the task for rerankers; empty: the checkpoint's default.

        Raises:
            InvalidRequestError: the model does not make scores, or a text is outside its limit.
        """
        pairs = pairs_of(queries, documents)
        digest = self.adapter_digest(adapter)
        return self._pooling.score(pairs, digest, instruction=instruction)

    def classify(
        self, inputs: Prompt | Sequence[Prompt], *, adapter: str = ""
    ) -> list[Classification]:
        """Return the most probable label of each input, and the probabilities of all labels.

        Raises:
            InvalidRequestError: the model has no labels, or an input is outside its limit.
        """
        return self._pooling.classify(without_images(inputs), self.adapter_digest(adapter))

    @property
    def pooling_setup(self) -> PoolingSetup:
        """Return which embeddings, scores or labels the checkpoint can compute, and how."""
        return self._pooling.setup

    def adapter_digest(self, name: str) -> AdapterDigest:
        """Return the digest of the adapter that a name refers to.

        An empty name means the base model, whose digest is empty.
        """
        return self.named_adapters.digest(name)

    def begin_pooled(self, answers: Sequence[PooledAnswer]) -> None:
        """Submit pooled requests of one adapter to the engine; first load the adapter if needed.

        Raises:
            AdapterError: the adapter's files have changed since they were first read.
            AdapterMissingError: no name refers to the adapter any more.
            OverloadedError: there is no slot for the adapter.
        """
        digests = {answer.request.adapter for answer in answers}
        self.named_adapters.load_again(self.named_adapters.names_of(digests))
        for answer in answers:
            self.engine.add_request(answer.request)
            self._answers[answer.request.request_id] = answer

    def _run_pooled(self, answers: Sequence[PooledAnswer]) -> None:
        """Run pooled requests until all have ended."""
        self._check_awake()
        self.begin_pooled(answers)
        while not all(answer.ended for answer in answers):
            self._step()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 128,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        adapter: str = "",
    ) -> list[list[BeamCompletion]]:
        """Return each prompt's ``beam_width`` best outputs, best first; see `BeamSearchParams`.

        The tokens equal those that `transformers` returns for ``generate(num_beams=beam_width,
        do_sample=False)``. Each step reuses the beams' KV from the prefix cache; without a prefix
        cache, each step recomputes the beams, with the same result.

        Raises:
            InvalidRequestError: a prompt or a parameter is outside its limit, and nothing was run;
                or an image cannot be decoded.
        """
        beams = self.begin_beams(
            prompts,
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        while step := beams.next_prompts():
            self._check_awake()
            self.named_adapters.load_again({adapter})
            one = beams.sampling_params
            choices = [self._make_choices(prompt, one, adapter) for prompt in step]
            adapters = {request.adapter for requests in choices for request in requests}
            answers = self._run(choices)
            for error in (answer.error for answer in answers if answer.error is not None):
                raise error  # for example, an image cannot be decoded
            beams.advance([answer.completion() for answer in answers], adapters)
        return beams.results()

    def begin_beams(self, prompts: Prompt | Sequence[Prompt], **params: Any) -> OfflineBeams:
        """Check the prompts and parameters of a beam search, and return the search.

        Args:
            params: fields of `BeamSearchParams`, except the end tokens, which are the model's.

        Raises InvalidRequestError if a prompt or a parameter is outside its limit.
        """
        return OfflineBeams(
            [self._maker.read(prompt) for prompt in as_list(prompts)],
            BeamSearchParams(**params, end_token_ids=self.engine.eos_token_ids),
            self.engine.max_model_len,
            self.tokenizer,
        )

    def load_adapter(self, name: str, source: str | Path, *, pinned: bool = False) -> AdapterDigest:
        """Load a LoRA adapter, or replace the adapter of this name; return the digest.

        Open requests keep the adapter that they began with. If all slots (``max_adapters``) are
        taken, the least recently used adapter is unloaded.

        Args:
            name: name for `generate`, 1 to 256 printable characters.
            source: a folder in PEFT's layout, a GGUF file, an installed package with an adapter, or
                a hub id.
            pinned: whether the adapter is never unloaded to free a slot.

        Raises:
            AdapterError: ``source`` has no adapter, or its files are malformed or do not fit the
                model.
            OverloadedError: all adapters in memory are in use or pinned.
        """
        return self.named_adapters.load(name, source, pinned=pinned)

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and unload it when its last request ends.

        Raises InvalidRequestError if no adapter has this name.
        """
        self.named_adapters.unload(name)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str = "",
        priority: int = 0,
        pin_s: float = 0.0,
        session: str = "",
    ) -> Iterator[TextDelta]:
        """Complete one prompt, piece by piece; closing the iterator aborts the request.

        The pieces of several outputs (``SamplingParams.n``) are interleaved. Raises
        InvalidRequestError on the first iteration.
        """
        self._check_awake()
        terms = terms_of(pin_s, session)
        self.named_adapters.load_again({adapter})
        requests = self._make_choices(
            prompt, sampling_params or SamplingParams(), adapter, priority
        )
        answers = self._begin(requests, terms, streams=True)
        try:
            while not all(answer.ended for answer in answers):
                self._check_awake()
                self._step()
                for answer in answers:
                    yield from answer.take_unread()
            for answer in answers:  # answers that were complete while another stream was read
                yield from answer.take_unread()
        finally:
            for request in requests:
                self._end(request.request_id)
            while self.engine.step_in_flight and not self._answers:
                self._step()  # because maybe no later call ends this step

    def prefetch(self, session: str, *, ttl_s: float) -> None:
        """Keep the prefix of a session's last prompt and answer, because its next turn comes soon.

        With ``kv_files``, a thread reads those blocks ahead that the prefix cache lacks. Does
        nothing if the session is unknown.

        Args:
            session: name of the session, as in `generate`, `chat` and `stream`.
            ttl_s: seconds for which to keep the prefix, as far as ``pin_share`` allows.

        Raises InvalidRequestError if an argument is wrong, or the engine sleeps or is paused.
        """
        check_ttl(ttl_s)
        self._check_awake()
        self.engine.features.hint_session(_OWNER, name_of(session), ttl_s)

    def drop_pins(self, session: str) -> None:
        """Keep the prefixes of a session no longer, because it does not come back.

        Raises InvalidRequestError if no session is named.
        """
        self.engine.features.hint_session(_OWNER, name_of(session), 0.0)

    @property
    def weights(self) -> str:
        """Return the version of the weights in use, which is the digest of their files."""
        return self.served_weights.digest

    def update_weights(self, source: WeightsSource, *, when: str = "drain") -> str:
        """Replace the weights by others of the same model; return the new weights' version.

        Afterwards, tokens are the same as from a new `LLM` with these weights. Before anything
        changes, all names, shapes and dtypes are checked, and all weights must be finite. The
        prefix cache is emptied, and adapters are read again when needed. During the change, memory
        holds old and new weights.

        Args:
            source: a model folder, a folder or a file of safetensors, a GGUF file, a hub id, or
                all tensors of the checkpoint with their names, on any device.
            when: what happens to open streams. ``drain``: they finish with the old weights, and
                their pieces are kept until read. ``abort``: they end with the tokens so far.

        Raises:
            InvalidRequestError: the weights cannot be used; the message names the tensor and the
                limit.
        """
        how = read_choice(WhenOpen, "when", when)
        self.check_drains(how)
        new = open_source(source, self.served_weights.folder)
        self._stage(lambda: self.served_weights.begin(new), new)
        self._end_open(how)
        return self.served_weights.use()

    def pause(self) -> None:
        """Compute nothing until `resume`; new prompts and reads of open streams raise an error."""
        self.is_paused = True

    def resume(self) -> None:
        """End a pause: later calls compute again."""
        self.is_paused = False

    def sleep(self, level: str = "host", *, when: str = "drain") -> None:
        """Free the KV cache's memory and the weights' device memory until `wake`.

        Args:
            level: ``host``: keep the weights in host memory; on a CPU, they are there already.
                ``dropped``: free the weights; `wake` reads them from their files again.
            when: what happens to open streams; see `update_weights`.

        Raises:
            InvalidRequestError: an argument is wrong, or the weights cannot move to the host.
        """
        kind, how = read_choice(SleepLevel, "level", level), read_choice(WhenOpen, "when", when)
        self.check_drains(how)
        self._end_open(how)
        self.served_weights.sleep(kind)

    def wake(self) -> None:
        """End a sleep, with unchanged weights; `update_weights` ends a sleep with new weights.

        Raises:
            InvalidRequestError: the files of dropped weights have changed or are gone.
        """
        if not self.served_weights.wake():
            self._stage(lambda: None)
            self.served_weights.use()

    def metrics(self) -> EngineMetrics:
        """Return the metrics of the engine."""
        return self.engine.metrics()

    def _stage(self, begin: Callable[[], None], new: NewWeights | None = None) -> None:
        """Load new weights, and wait until they are checked; drop them on a failure."""
        try:
            begin()
        except BaseException:
            if new is not None:
                new.close()
            raise
        try:
            while not self.served_weights.is_ready():
                time.sleep(_POLL_S)
        except BaseException:
            self.served_weights.drop()
            raise

    def _end_open(self, how: WhenOpen) -> None:
        """Let all open requests finish, or end them; then end the step in flight."""
        if how is WhenOpen.ABORT:
            for request_id in list(self._answers):
                self.abort_answer(request_id)
        engine = self.engine
        while engine.has_work or engine.step_in_flight or engine.features.is_awaited:
            self._step()

    def _check_awake(self) -> None:
        """Raise InvalidRequestError while the engine sleeps or is paused."""
        if self.is_paused or self.served_weights.is_asleep:
            state, remedy = (
                ("asleep", "wake") if self.served_weights.is_asleep else ("paused", "resume")
            )
            raise InvalidRequestError("engine", f"is {state}; call {remedy}() first")

    def check_drains(self, how: WhenOpen) -> None:
        """Raise InvalidRequestError if ``how`` would wait for requests of a paused engine."""
        if self.is_paused and how is WhenOpen.DRAIN and self.engine.requests:
            problem = "must be abort while the engine is paused with open requests, got drain"
            raise InvalidRequestError("when", problem)

    def _begin(
        self, choices: list[Request], terms: PinTerms | None = None, *, streams: bool = False
    ) -> list[Answer]:
        """Submit the requests of one prompt to the engine; return their answers, still empty.

        Args:
            terms: what to keep of the prompt and the first answer; None: nothing.
        """
        answers = []
        for index, request in enumerate(choices):
            answer = Answer(
                request,
                self.tokenizer,
                choice_index=index,
                streams=streams,
                weights=self.weights,
            )
            self._answers[request.request_id] = answer
            answers.append(answer)
        if choices[0].awaits_grammar:  # siblings cannot share an uncompiled grammar
            for request in choices:
                self.engine.add_request(request)
        else:
            choices[0].siblings = choices[1:]
            self.engine.add_request(choices[0])
        if terms is not None:
            self.engine.features.pins.begin(choices[0], terms)
        return answers

    def _end(self, request_id: str) -> None:
        """Drop the answer of a request, and abort the request unless it has ended."""
        self._answers.pop(request_id, None)
        self.engine.abort(request_id)

    def abort_answer(self, request_id: str) -> None:
        """End a request with the tokens that it has so far; do nothing if it has ended."""
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.end_early()
            self._end(request_id)

    def _step(self, *, waits: bool = True) -> int:
        """Run a step and add its outputs to the answers; return how many requests ended.

        An unexpected error ends the engine, and a crash dump is written.

        Args:
            waits: whether to wait for images or files if nothing else can be computed.
        """
        if waits and not self.engine.has_work:
            self.engine.features.wait()
        if self._dead:
            raise EngineDeadError("the engine has failed before; make a new LLM")
        try:
            result = self.engine.step()
        except Exception as error:  # any error ends the engine
            self._dead = True
            path = dump_crash(self.engine, error)
            raise EngineDeadError(f"the engine cannot continue: {error}; see {path}") from error
        if not self.engine.has_work:
            self.engine.executor.rest()
        num_ended = self._end_failed()
        for output in result.outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:  # a caller submitted this request directly to the engine
                continue
            answer.on_delta(output)
            if answer.ended:
                self._end(output.request_id)
                num_ended += 1
        if not self.engine.has_work:  # no further step may come
            self.engine.features.settle_files()
        return num_ended

    def _end_failed(self) -> int:
        """Abort the requests that the engine cannot continue; return how many it aborted."""
        num_ended = 0
        for request_id, error in self.engine.take_failures():
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                logger.warning("%s ends: %s", request_id, error)
                answer.end_early(error)
                num_ended += 1
        return num_ended

    def _make_choices(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams,
        adapter: str = "",
        priority: int = 0,
        *,
        compiles_grammar: bool = True,
    ) -> list[Request]:
        """Make one request per wanted output (``SamplingParams.n``) of a prompt.

        Args:
            adapter: name of an adapter; empty: the base model.
            compiles_grammar: whether to wait until a grammar is compiled; if False, the engine
                compiles the grammar while other requests run.
        """
        digest = self.named_adapters.digest(adapter)
        return self._maker.make_choices(
            prompt, params, digest, priority, compiles_grammar=compiles_grammar
        )


def _without_path(value: Any) -> Any:
    """Return the text of a path, and any other value unchanged."""
    return str(value) if isinstance(value, PurePath) else value
