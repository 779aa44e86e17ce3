"""AsyncLLM: the engine in one process for asyncio: one thread runs steps for any number of tasks.

    from baton import AsyncLLM
    async with AsyncLLM("examples/demo_model") as llm:
        async for piece in llm.stream("def read_config(path):"):
            print(piece.text, end="")

task ── call ──> the engine's thread, which steps an `LLM` ── news of a step ──> the task's loop
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

from baton.adapters.digest import AdapterDigest
from baton.api.beam_search import BeamCompletion, EarlyStopping
from baton.api.changes import SleepLevel, WhenOpen, read_choice
from baton.api.errors import (
    BatonError,
    EngineDeadError,
    InvalidRequestError,
    RequestCancelledError,
)
from baton.api.outputs import Completion, TextDelta
from baton.api.pooling import Classification, Embedding, Score
from baton.api.sampling_params import SamplingParams
from baton.kv.pins import PinTerms
from baton.text.tokenizer import Tokenizer
from engine.core.metrics import EngineMetrics
from engine.core.request import Request
from engine.engine import Engine
from engine.engine_loop import EngineLoop
from engine.offline.answer import Answer
from engine.offline.hints import terms_of
from engine.offline.llm import LLM
from engine.offline.pooling import OfflinePooling, PooledAnswer, pairs_of
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
from engine.offline.weights_source import WeightsSource, open_source

T = TypeVar("T")
U = TypeVar("U")

ENGINE_THREAD = "engine"
_POLL_S = 0.005
# Maximum number of threads that wait for pooled requests. They are not the event loop's default
# threads: during a sleep, all of them may wait, and the call that ends the sleep needs a thread,
# too.
_POOL_THREADS = 64


@dataclass(frozen=True, slots=True)
class _News:
    """The results of one step for one call.

    Attributes:
        pieces: new pieces of text, if the call streams.
        is_last: whether all answers of the call have ended.
        error: why the call cannot continue.
    """

    pieces: Sequence[TextDelta] = ()
    is_last: bool = False
    error: BatonError | None = None


class _Call:
    """One prompt's outputs, passed from the engine's thread to a task on an event loop.

    Args:
        requests: one request per wanted output.
        terms: what to keep of the prompt and the first answer; None: nothing.
        streams: whether the task reads the outputs piece by piece.

    Attributes:
        loop: the task's loop.
        is_read: whether the task has read the call's last `_News`.
        answers: the outputs so far; changed only by the engine's thread until they have ended.
    """

    def __init__(self, requests: list[Request], terms: PinTerms | None, *, streams: bool) -> None:
        self.requests, self.terms, self.streams = requests, terms, streams
        self.loop = asyncio.get_running_loop()
        self.is_read = False
        self.answers: list[Answer] = []
        self._news: asyncio.Queue[_News] = asyncio.Queue()

    def take_news(self) -> _News | None:
        """Return results that the task has not got yet, or None; called on the engine's thread."""
        pieces = [piece for answer in self.answers for piece in answer.take_unread()]
        is_last = all(answer.ended for answer in self.answers)
        error = next((answer.error for answer in self.answers if answer.error is not None), None)
        return _News(pieces, is_last, error) if pieces or is_last or error else None

    def put(self, news: _News) -> None:
        """Wake the task with new results; call on the task's event loop."""
        self._news.put_nowait(news)

    async def read(self) -> AsyncIterator[TextDelta]:
        """Yield pieces until all answers have ended; raise an answer's error."""
        while not self.is_read:
            news = await self._news.get()
            self.is_read = news.is_last or news.error is not None
            for piece in news.pieces:
                yield piece
            if news.error is not None:
                raise news.error


class _Held(NamedTuple):
    """Calls held back while the engine is being changed, with the names of their adapters."""

    calls: Sequence[_Call]
    adapters: set[str]


@dataclass(eq=False)
class _PoolTask:
    """A task's pooled requests, which run in one or more rounds.

    Attributes:
        has_begun: whether a round has begun. A change of the engine then waits for the later
            rounds, so that one version of the weights computes all results.
        why_left: why no further round may begin; None: a further round may begin.
    """

    has_begun: bool = False
    why_left: BatonError | None = None


@dataclass(eq=False)
class _Pool:
    """One round of pooled requests (embeddings, scores or labels) that one thread waits for.

    Attributes:
        task: the task that needs the results.
        done: event that is set once all answers have ended, or once ``error`` is set.
        error: why there are no results.
    """

    task: _PoolTask
    answers: Sequence[PooledAnswer]
    done: threading.Event = field(default_factory=threading.Event)
    error: BatonError | None = None


class AsyncLLM:
    """Completes prompts for asyncio: the tasks of one or several event loops share one engine.

    The constructor has the arguments and the errors of `LLM`, and blocks while it loads the model:
    call it before the event loop starts, or with ``asyncio.to_thread``.
    """

    def __init__(
        self,
        model: str,
        *,
        chat_template: Any = None,
        adapters: Any = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._llm = LLM(model, chat_template=chat_template, adapters=adapters, **options)
        self._open: set[_Call] = set()  # changed only by the engine's thread
        self._pools: list[_Pool] = []  # changed only by the engine's thread
        self._held_pools: list[_Pool] = []
        self._pool_tasks: set[_PoolTask] = set()  # tasks in `embed`, `score` or `classify`
        self._death = ""
        # New calls are held back while the engine is changed, and while it sleeps.
        self._held: list[_Held] = []
        self._holds = False
        self._current: object | None = None  # the change in progress; None: no change
        engine = self.engine
        setup = self._llm.pooling_setup
        self._pooling = OfflinePooling(
            engine, setup, self._llm.tokenizer, functools.partial(self._run_pooled, _PoolTask())
        )
        self._pool_threads = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="pooling")
        self._thread = EngineLoop(
            self._step, self._die, name=ENGINE_THREAD, when_idle=engine.do_idle_work
        )
        engine.features.wake_with(self._thread.wake)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """Return the engine; only its thread may change it."""
        return self._llm.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the checkpoint's tokenizer; None if the checkpoint has none."""
        return self._llm.tokenizer

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        pin_s: float = 0.0,
        session: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Complete each prompt; see `LLM.generate` for arguments and results.

        Cancelling the task aborts its requests.

        Raises:
            InvalidRequestError: a prompt or a parameter is outside its limit.
            OverloadedError: a grammar cannot be compiled now.
            DamagedModelError: the model computed NaN or infinite logits.
            EngineDeadError: the engine cannot continue, or was closed.
        """
        prompt_list = as_list(prompts)
        params_list = params_per_prompt(sampling_params, len(prompt_list))
        names = name_per_prompt("adapter", adapter, len(prompt_list))
        sessions = name_per_prompt("session", session, len(prompt_list))
        hints = [terms_of(pin_s, one) for one in sessions]
        priorities = priority_per_prompt(priority, len(prompt_list))
        calls = [
            self._make_call(*one, streams=False)
            for one in zip(prompt_list, params_list, names, priorities, hints, strict=True)
        ]
        return await self._complete(calls, set(names))

    async def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        pin_s: float = 0.0,
        session: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Answer each conversation, using the checkpoint's chat template; otherwise like
        `generate`.

        Args:
            conversations: lists of messages with a ``role`` and a ``content``; one or many.
        """
        prompts = self._llm.encode_chats(conversations)
        return await self.generate(
            prompts,
            sampling_params,
            adapter=adapter,
            priority=priority,
            pin_s=pin_s,
            session=session,
        )

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str = "",
        priority: int = 0,
        pin_s: float = 0.0,
        session: str = "",
    ) -> AsyncGenerator[TextDelta, None]:
        """Complete one prompt, piece by piece.

        On the first iteration, it raises the errors that `generate` raises. The pieces of several
        outputs (``SamplingParams.n``) are interleaved. Cancelling the task or closing the iterator
        (``aclose``) aborts the request.
        """
        params = sampling_params or SamplingParams()
        terms = terms_of(pin_s, session)
        call = self._make_call(prompt, params, adapter, priority, terms, streams=True)
        try:
            await self._begin([call], {adapter})
            async for piece in call.read():
                yield piece
        finally:
            self._leave([call])

    async def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        adapter: str = "",
    ) -> list[Embedding]:
        """Return the embedding of each input; see `LLM.embed`. Cancelling the task aborts all."""
        embed = functools.partial(
            OfflinePooling.embed, prompt_name=prompt_name, dimensions=dimensions
        )
        return await self._pool(embed, without_images(inputs), adapter)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str = "",
        adapter: str = "",
    ) -> list[Score]:
        """Return the relevance of documents to queries; see `LLM.score`."""
        score = functools.partial(OfflinePooling.score, instruction=instruction)
        return await self._pool(score, pairs_of(queries, documents), adapter)

    async def classify(
        self, inputs: Prompt | Sequence[Prompt], *, adapter: str = ""
    ) -> list[Classification]:
        """Return the most probable label of each input, with probabilities; see `LLM.classify`."""
        return await self._pool(OfflinePooling.classify, without_images(inputs), adapter)

    async def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 128,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        adapter: str = "",
    ) -> list[list[BeamCompletion]]:
        """Return each prompt's ``beam_width`` best outputs, best first; see `LLM.beam_search`.

        The searches begin again if the weights or the adapter of this name change meanwhile.
        Cancelling the task ends all searches.

        Raises RequestCancelledError if a change of the engine aborts requests.
        """
        beams = self._llm.begin_beams(
            prompts,
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        while step := beams.next_prompts():
            one = beams.sampling_params
            calls = [
                self._make_call(prompt, one, adapter, 0, None, streams=False) for prompt in step
            ]
            adapters = {request.adapter for call in calls for request in call.requests}
            beams.advance(await self._complete(calls, {adapter}), adapters)
        return beams.results()

    async def abort(self, request_id: str) -> None:
        """End an output with the tokens so far: its last piece has ``FinishReason.ABORT``.

        Does nothing if the output has ended.

        Args:
            request_id: ``TextDelta.request_id`` of the output.
        """

        def abort() -> None:
            self._llm.abort_answer(request_id)
            self._tell()

        await self._thread.ask(abort)

    async def prefetch(self, session: str, *, ttl_s: float) -> None:
        """Keep a session's prefix, because its next turn comes soon; see `LLM.prefetch`."""
        await self._thread.ask(functools.partial(self._llm.prefetch, session, ttl_s=ttl_s))

    async def drop_pins(self, session: str) -> None:
        """Keep the prefixes of a session no longer; see `LLM.drop_pins`."""
        await self._thread.ask(functools.partial(self._llm.drop_pins, session))

    async def load_adapter(
        self, name: str, source: str | Path, *, pinned: bool = False
    ) -> AdapterDigest:
        """Load a LoRA adapter between two steps; see `LLM.load_adapter`."""
        load = functools.partial(self._llm.load_adapter, name, source, pinned=pinned)
        return await self._thread.ask(load)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter once its last request ends; see `LLM.unload_adapter`."""
        await self._thread.ask(functools.partial(self._llm.unload_adapter, name))

    @property
    def weights(self) -> str:
        """Return the version of the weights in use: the digest of their files."""
        return self._llm.weights

    async def update_weights(self, source: WeightsSource, *, when: str = "drain") -> str:
        """Replace the weights by others of the same model; return the new weights' version.

        Requests continue with the old weights while the new weights are loaded and checked. After
        that, new requests wait and begin with the new weights. See `LLM.update_weights`.

        Args:
            source: where the new weights are; see `LLM.update_weights`.
            when: what happens to open requests once the new weights are loaded. ``drain``: they
                finish with the old weights. ``abort``: they end with the tokens so far.

        Raises:
            InvalidRequestError: the weights cannot be used, or another change is in progress.
        """
        how, weights = read_choice(WhenOpen, "when", when), self._llm.served_weights
        new = await asyncio.to_thread(open_source, source, weights.folder)
        try:
            return await self._change(how, weights.use, lambda: weights.begin(new))
        except BaseException:
            if not weights.has(new):
                new.close()
            raise

    async def pause(self) -> None:
        """Compute nothing until `resume`: open requests stand still, and new requests wait."""
        await self._thread.ask(self._llm.pause)

    async def resume(self) -> None:
        """End a pause: open requests go on, and waiting ones start."""
        await self._thread.ask(self._llm.resume)

    async def sleep(self, level: str = "host", *, when: str = "drain") -> None:
        """Free memory until `wake`; new requests wait meanwhile. See `LLM.sleep`."""
        kind, how = read_choice(SleepLevel, "level", level), read_choice(WhenOpen, "when", when)
        await self._change(how, functools.partial(self._llm.served_weights.sleep, kind))

    async def wake(self) -> None:
        """End a sleep, with unchanged weights; see `LLM.wake`."""
        weights, how = self._llm.served_weights, WhenOpen.DRAIN
        if weights.keeps_weights:
            await self._change(how, weights.wake)
        else:
            await self._change(how, weights.use, weights.wake)

    def metrics(self) -> EngineMetrics:
        """Return the engine's metrics; safe from any thread."""
        return self._llm.metrics()

    async def close(self) -> None:
        """End the engine; calls in progress raise EngineDeadError. May be called twice."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ on the tasks' loops

    async def _complete(self, calls: Sequence[_Call], adapters: set[str]) -> list[Completion]:
        """Run calls to their ends; return all their outputs, in order."""
        try:
            await self._begin(calls, adapters)
            for call in calls:
                async for _ in call.read():
                    pass
        finally:
            self._leave(calls)
        return [answer.completion() for call in calls for answer in call.answers]

    def _make_call(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams,
        adapter: str,
        priority: int,
        terms: PinTerms | None,
        *,
        streams: bool,
    ) -> _Call:
        """Check a prompt, and make its call; raises InvalidRequestError if a value is wrong."""
        make = self._llm._make_choices
        requests = make(prompt, params, adapter, priority, compiles_grammar=False)
        return _Call(requests, terms, streams=streams)

    async def _pool(
        self,
        pool: Callable[[OfflinePooling, list[U], AdapterDigest], list[T]],
        inputs: list[U],
        adapter: str,
    ) -> list[T]:
        """Compute embeddings, scores or labels on another thread, so that other tasks can run."""
        find_digest = functools.partial(self._llm.adapter_digest, adapter)
        digest = await self._thread.ask(find_digest)
        task, loop = _PoolTask(), asyncio.get_running_loop()
        pooling = self._pooling.with_run(functools.partial(self._run_pooled, task))
        try:
            return await loop.run_in_executor(self._pool_threads, pool, pooling, inputs, digest)
        finally:
            why = RequestCancelledError("the task was cancelled")
            self._thread.call(functools.partial(self._leave_pools, task, why))

    def _run_pooled(self, task: _PoolTask, answers: Sequence[PooledAnswer]) -> None:
        """Submit a round of a task's pooled requests, and wait until they have ended.

        Raises:
            AdapterError, OverloadedError: the requests' adapter cannot be loaded.
            RequestCancelledError: the task was cancelled, or a change aborts requests.
            EngineDeadError: the engine cannot continue, or was closed.
        """
        if not answers:
            return
        pool = _Pool(task, answers)
        self._thread.call(functools.partial(self._begin_pool, pool)).result()
        pool.done.wait()
        if pool.error is not None:
            raise pool.error

    async def _begin(self, calls: Sequence[_Call], adapters: set[str]) -> None:
        """Submit calls to the engine, or hold them back while a change is in progress.

        Raises:
            AdapterError: an adapter's files have changed since they were first read.
            OverloadedError: there are too few slots for the adapters.
            EngineDeadError: the engine cannot continue, or was closed.
        """

        def begin() -> None:
            if self._holds:
                self._held.append(_Held(calls, adapters))
            else:
                self._begin_now(calls, adapters)

        if self._death:
            raise EngineDeadError(self._death)
        await self._thread.ask(begin)

    def _leave(self, calls: Iterable[_Call]) -> None:
        """Abort the open requests of those calls that a task has not read to the end."""
        left = [call for call in calls if not call.is_read]
        if not left:
            return

        def abort() -> None:
            self._held = [one for one in self._held if not set(left) & set(one.calls)]
            for call in left:
                if call in self._open:
                    self._abort(call)

        self._thread.call(abort)

    async def _change(
        self, how: WhenOpen, apply: Callable[[], T], begin: Callable[[], object] | None = None
    ) -> T:
        """Change the engine once no request is open.

        Args:
            how: whether open requests finish first, or end now with the tokens so far.
            apply: makes the change, on the engine's thread.
            begin: begins to load new weights while open requests go on; None: the change needs no
                new weights.

        Raises InvalidRequestError if another change is going on, or what ``apply`` raises.
        """
        ask, change = self._thread.ask, object()
        try:
            await ask(functools.partial(self._start_change, change, how))
            if begin is not None:
                await ask(begin)
                await self._wait_for(self._llm.served_weights.is_ready)
            await ask(functools.partial(self._hold, how))
            await self._wait_for(lambda: self._is_idle() and not self._pool_tasks)
            return await ask(apply)
        finally:
            self._thread.call(functools.partial(self._end_change, change))

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition, which the engine's thread checks between steps, is true."""
        while not await self._thread.ask(condition):  # noqa: ASYNC110  # asked between steps
            await asyncio.sleep(_POLL_S)

    # ------------------------------------------------------------------ on the engine's thread

    def _step(self) -> bool:
        """Run a step if there is something to compute; return whether to call `_step` again now."""
        engine = self.engine
        if self._is_idle() or (self._llm.is_paused and engine.requests):
            return False
        self._llm._step(waits=False)  # decoded images wake the thread
        self._tell()
        return engine.has_work or engine.step_in_flight

    def _is_idle(self) -> bool:
        return not (self.engine.requests or self.engine.step_in_flight)

    def _begin_now(self, calls: Sequence[_Call], adapters: set[str]) -> None:
        self._llm.named_adapters.load_again(adapters)
        for call in calls:
            call.answers = self._llm._begin(call.requests, call.terms, streams=call.streams)
            self._open.add(call)

    def _begin_pool(self, pool: _Pool) -> None:
        """Submit pooled requests, or hold them back while a change is in progress."""
        task = pool.task
        if task.why_left is not None:
            self._end_pool(pool, task.why_left)
        elif self._holds and not task.has_begun:
            self._held_pools.append(pool)
        else:
            task.has_begun = True
            self._pool_tasks.add(task)
            self._pools.append(pool)
            try:
                self._llm.begin_pooled(pool.answers)
            except BatonError as error:  # an error raised here would end the engine
                self._end_pool(pool, error)

    def _leave_pools(self, task: _PoolTask, why: BatonError) -> None:
        """Remove an ended task from the lists, and abort its open pooled requests."""
        task.why_left = why
        self._pool_tasks.discard(task)
        for pool in [one for one in (*self._pools, *self._held_pools) if one.task is task]:
            self._end_pool(pool, why)

    def _end_pool(self, pool: _Pool, error: BatonError) -> None:
        """Abort a round of pooled requests, and raise an error in the thread that waits for it."""
        for pools in (self._pools, self._held_pools):
            if pool in pools:
                pools.remove(pool)
        for answer in pool.answers:
            self._llm._end(answer.request.request_id)
        pool.error = error
        pool.done.set()

    def _start_change(self, change: object, how: WhenOpen) -> None:
        """Mark the engine as changing; raises InvalidRequestError if it cannot be changed now."""
        if self._current is not None:
            raise InvalidRequestError("engine", "is changing already; wait for the other change")
        self._llm.check_drains(how)
        self._current = change

    def _hold(self, how: WhenOpen) -> None:
        """Hold back new calls; if ``how`` is ``ABORT``, end the open calls."""
        self._holds = True
        if how is WhenOpen.ABORT:
            for call in self._open:
                for request in call.requests:
                    self._llm.abort_answer(request.request_id)
            for task in list(self._pool_tasks):  # pooled requests have no partial results
                self._leave_pools(task, RequestCancelledError("a change of the engine aborts it"))
            self._tell()

    def _end_change(self, change: object) -> None:
        """End a change: drop weights that were loaded but are not used, and start the held calls.

        Held calls are those that came during the change. While the engine is asleep, no held call
        is started.
        """
        if self._current is not change:  # the change was refused, or cancelled before it started
            return
        weights = self._llm.served_weights
        weights.drop()
        self._current = None
        self._holds = weights.is_asleep
        if self._holds:
            return
        pools, self._held_pools = self._held_pools, []
        for pool in pools:
            self._begin_pool(pool)
        held, self._held = self._held, []
        for one in held:
            try:
                self._begin_now(one.calls, one.adapters)
            except BatonError as error:
                for call in one.calls:
                    self._abort(call)  # calls before the failed one were submitted
                    _send(call, _News(error=error))

    def _tell(self) -> None:
        """Send the tasks of each event loop their results in one message; wake waiting threads."""
        for pool in [one for one in self._pools if all(answer.ended for answer in one.answers)]:
            self._pools.remove(pool)
            pool.done.set()
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[_Call, _News]]](list)
        for call in list(self._open):
            news = call.take_news()
            if news is not None:
                by_loop[call.loop].append((call, news))
                if news.is_last or news.error:
                    # An error may have ended only some of the prompt's outputs.
                    self._abort(call)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, items)
            except RuntimeError:  # the event loop is closed, so no task waits
                for call, _ in items:
                    self._abort(call)

    def _abort(self, call: _Call) -> None:
        """Remove a call from the open calls, and end its open requests."""
        self._open.discard(call)
        for request in call.requests:
            self._llm._end(request.request_id)

    def _die(self, error: Exception) -> None:
        self._end_calls(f"the engine has failed: {error}")

    def _end_calls(self, why: str) -> None:
        """Fail all open calls and all later calls."""
        self._death = self._death or why
        held = [call for one in self._held for call in one.calls]
        for call in [*self._open, *held]:
            _send(call, _News(error=EngineDeadError(why)))
        for pool in (*self._pools, *self._held_pools):
            pool.error = EngineDeadError(why)
            pool.done.set()
        for ended in (self._open, self._held, self._pools, self._held_pools):
            ended.clear()

    def _close(self) -> None:
        self._thread.stop()
        self._end_calls("the engine was closed")
        self._pool_threads.shutdown(wait=False)
        self.engine.close()
        self._llm.served_weights.close()


def _send(call: _Call, news: _News) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed, so no task waits
        call.loop.call_soon_threadsafe(call.put, news)


def _hand_out(items: Iterable[tuple[_Call, _News]]) -> None:
    for call, news in items:
        call.put(news)
