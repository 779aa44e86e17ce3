"""GrammarCompiler: compiles requests' grammars into states, outside the step loop.

A worker process first tries each grammar, within limits of time and memory. Then a thread compiles
the grammar in this process, only once for equal grammars of one tenant. The mask of the next token
is computed in each returned state. Refuses to know: queues, steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from baton.api.errors import BatonError, ConfigError, InvalidRequestError, OverloadedError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.grammar_trials import SMALL_GRAMMARS, EarlyGrammars, GrammarTrials
from baton.text.grammars import compile_grammar, load_grammar_tokenizer, one_line
from engine.core.grammars.grammar import GrammarState
from engine.core.request import Request

NUM_THREADS = 2
MAX_CACHED = 64
MAX_CACHED_BYTES = 256 * 2**20
# Stack size of compiling threads, in bytes, because the library recurses into nested grammars. It
# suffices: the worker process has tried the grammar with a smaller stack. Unused stack takes no
# memory.
_STACK_BYTES = 512 * 2**20

logger = logging.getLogger(__name__)

Outcome = GrammarState | BatonError


Made = TypeVar("Made")


@dataclass(slots=True)
class _Compiled:
    """The cached result of compiling a grammar: a matcher or an error.

    Attributes:
        matcher: matcher at the beginning of an output, or an error; each request gets a copy to
            advance.
        num_bytes: memory that the grammar takes; 0: not known yet.
        may_pass_later: whether compiling failed for lack of resources, so that it may succeed
            later.
    """

    matcher: asyncio.Future[LLMatcher] | None = None
    num_bytes: int = 0
    may_pass_later: bool = False


class GrammarCompiler:
    """Compiles grammars for one checkpoint, and caches results.

    Tenants (`Request.extra_keys`) take turns and do not share any compiled grammars: otherwise a
    fast answer would reveal another tenant's grammar, and one tenant's queue would delay the
    others.

    Only the engine's thread calls the methods; other threads compile.

    Args:
        model_folder: folder of the checkpoint; its tokenizer is loaded for the first grammar.
        vocab_size: number of logits.
        eos_token_ids: tokens that are allowed where the output may end.
        early: the tokenizer, and the process from which worker processes are forked, if they were
            made before any thread started.

    Attributes:
        on_ready: called, on any thread, when `take_ready` has a new result.
    """

    def __init__(
        self,
        model_folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        early: EarlyGrammars | None = None,
    ) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._path = model_folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | InvalidRequestError | None = (
            None if early is None else early.tokenizer
        )
        self._tokenizer_lock = threading.Lock()
        template = None if early is None else early.template
        self._trials = GrammarTrials(model_folder, eos_token_ids, template)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        # serves the worker processes, on its own thread
        self._loop: asyncio.AbstractEventLoop | None = None
        # Compiled grammars by tenant and grammar, the least recently used one first.
        self._cache: OrderedDict[tuple[str, StructuredOutput], _Compiled] = OrderedDict()
        self._ready: deque[tuple[Request, Outcome]] = deque()

    def prepare(self) -> None:
        """Load the tokenizer, start threads, and compile a small grammar of each kind.

        The worker process loads its own tokenizer at the same time. If the tokenizer cannot be
        loaded, each request with a grammar gets the error.

        Raises:
            ConfigError: no thread or descriptor is left.
        """
        try:
            self._start()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"structured output: cannot start its threads: {error}") from error
        if not self._path.is_file():
            return
        trials = self._on_loop(self._trials.prepare())
        try:
            self._load_tokenizer()
            trials.result()
            for structured_output in SMALL_GRAMMARS:
                making = self._make_matcher(structured_output, _Compiled(), caller="")
                self._on_loop(making).result()
        except (BatonError, OSError, RuntimeError) as error:
            logger.warning("structured output: %s", error)

    def submit(self, request: Request) -> None:
        """Start compiling a request's grammar; a later `take_ready` returns the result."""
        structured_output = request.sampling_params.structured_output
        assert structured_output is not None
        caller = b"".join(request.extra_keys).hex()
        making = self._make_state(
            structured_output, request.sampling_params, request.output_token_ids, caller
        )

        def on_done(future: Future[Outcome]) -> None:
            error = future.exception()  # even a panic in Rust must end only the request
            unforeseen = InvalidRequestError("structured_output", one_line(repr(error)))
            self._ready.append((request, future.result() if error is None else unforeseen))
            self.on_ready()

        self._on_loop(making).add_done_callback(on_done)

    def take_ready(self) -> list[tuple[Request, Outcome]]:
        """Return the requests compiled since the last call, each with a state or an error."""
        ready: list[tuple[Request, Outcome]] = []
        while self._ready:
            ready.append(self._ready.popleft())
        return ready

    def follow_thought(self, request: Request) -> None:
        """Track the thought of a request if it has a thought but no grammar."""
        params = request.sampling_params
        if params.thinking is None or params.structured_output or request.grammar:
            return
        request.grammar = self._make_thought(params)
        for token_id in request.output_token_ids:
            request.grammar.accept(token_id)

    def compile_for(self, params: SamplingParams) -> GrammarState | None:
        """Compile the grammar of a future request, or track its thought; waits for the grammar.

        Returns None for parameters without grammar and thought. Raises InvalidRequestError or
        OverloadedError, as `compile_now` does.
        """
        if params.structured_output is None and params.thinking is None:
            return None
        return self.compile_now(params)

    def compile_now(self, params: SamplingParams) -> GrammarState:
        """Compile a grammar and wait for it; raises InvalidRequestError, OverloadedError."""
        if params.structured_output is None:
            return self._make_thought(params)
        outcome = self._on_loop(self._make_state(params.structured_output, params)).result()
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    # ------------------------------------------------------------------ on the loop's thread

    async def _make_state(
        self,
        structured_output: StructuredOutput,
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
        caller: str = "",
    ) -> Outcome:
        """Compile a grammar, advance a new state by the output so far, and compute its mask."""
        try:
            matcher = await asyncio.shield(self._compile(structured_output, caller))
            return await self._on_thread(lambda: self._bring_to(matcher, params, output_token_ids))
        except InvalidRequestError as error:
            # Raise a copy, because requests share the cached error.
            return InvalidRequestError(error.field, error.problem)
        except (BatonError, OSError, RuntimeError) as error:
            # Neither the request nor this node is at fault, so report an overload.
            return OverloadedError(f"structured_output: {error}")

    def _make_thought(self, params: SamplingParams) -> GrammarState:
        return GrammarState(None, params, self._vocab_size, self._eos_token_ids)

    def _bring_to(
        self, matcher: LLMatcher, params: SamplingParams, output_token_ids: Sequence[int]
    ) -> GrammarState:
        state = GrammarState(matcher.deep_copy(), params, self._vocab_size, self._eos_token_ids)
        if all(state.accept(token_id) for token_id in output_token_ids):
            state.compute_mask()
        return state

    def _compile(
        self, structured_output: StructuredOutput, caller: str = ""
    ) -> asyncio.Future[LLMatcher]:
        """Return the future matcher of a grammar, at the beginning of an output.

        Call on the event loop's thread.
        """
        key = caller, structured_output
        compiled = self._cache.get(key)
        if compiled is None or compiled.may_pass_later:
            compiled = self._cache[key] = _Compiled()
            making = self._make_matcher(structured_output, compiled, caller)
            compiled.matcher = asyncio.ensure_future(making)
            compiled.matcher.add_done_callback(_take_notice)
        self._cache.move_to_end(key)
        while len(self._cache) > MAX_CACHED or (
            len(self._cache) > 1
            and sum(one.num_bytes for one in self._cache.values()) > MAX_CACHED_BYTES
        ):
            self._cache.popitem(last=False)
        assert compiled.matcher is not None
        return compiled.matcher

    async def _make_matcher(
        self, structured_output: StructuredOutput, compiled: _Compiled, caller: str
    ) -> LLMatcher:
        """Compile a grammar in a worker process; if that succeeds, compile it in this process."""
        try:
            trial = await self._trials.run(structured_output, caller=caller)
            compiled.num_bytes = trial.num_bytes
            grammar = trial.grammar
            return await self._on_thread(
                lambda: compile_grammar(structured_output, grammar, self._load_tokenizer())
            )
        except InvalidRequestError:
            raise
        except (BatonError, OSError, RuntimeError):
            # The queue of grammars is full, or the system has no process or thread left.
            compiled.may_pass_later = True
            raise

    async def _on_thread(self, make: Callable[[], Made]) -> Made:
        """Run a function on a compiling thread; the grammar library releases the GIL meanwhile."""
        before = threading.stack_size(_STACK_BYTES)  # for threads that are started later
        try:
            future = self._threads.submit(make)
        finally:
            threading.stack_size(before)
        return await asyncio.wrap_future(future)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = load_grammar_tokenizer(self._path, self._eos_token_ids)
                except InvalidRequestError as error:
                    self._tokenizer = error
            if isinstance(self._tokenizer, InvalidRequestError):
                raise InvalidRequestError(self._tokenizer.field, self._tokenizer.problem)
            return self._tokenizer

    # ------------------------------------------------------------------ threads

    def _on_loop(self, doing: Coroutine[Any, Any, Made]) -> Future[Made]:
        """Run a coroutine on the event loop that serves the worker processes."""
        return asyncio.run_coroutine_threadsafe(doing, self._start())

    def _start(self) -> asyncio.AbstractEventLoop:
        """Start the event loop and the threads unless they run; they end with this object."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="grammar-trials", daemon=True)
            thread.start()
            weakref.finalize(self, _stop, loop, thread)
            self._loop = loop
            all_there = threading.Barrier(
                NUM_THREADS
            )  # keeps each thread busy until all have started
            waiting = [self._on_loop(self._on_thread(all_there.wait)) for _ in range(NUM_THREADS)]
            try:
                for one in waiting:
                    one.result()
            except RuntimeError:
                all_there.abort()
                raise
        return self._loop


def _take_notice(making: asyncio.Future[LLMatcher]) -> None:
    """Read a future's error; otherwise, asyncio logs the errors for which no caller waits."""
    if not making.cancelled():
        making.exception()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
