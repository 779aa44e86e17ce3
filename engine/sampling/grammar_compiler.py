"""GrammarCompiler: from what a request asks for to the state of its grammar, off the step loop.

Each grammar is compiled in a worker process first, within limits; here, then, on threads of its
own; equal grammars of one tenant once. Knows no queue and no step.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from baton.api.errors import BatonError, InvalidRequestError
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.grammar_trials import GrammarTrials
from baton.text.grammars import compile_grammar, load_grammar_tokenizer
from engine.core.grammar import GrammarState
from engine.core.request import Request

NUM_THREADS = 2
MAX_CACHED = 64
MAX_CACHED_BYTES = 256 * 2**20
# The library recurses where grammars nest, as it did in the worker, whose stack is smaller. Only
# what is used is real.
_STACK_BYTES = 512 * 2**20

Outcome = GrammarState | InvalidRequestError


@dataclass(slots=True)
class _Compiled:
    """A grammar that is remembered. What failed is, too.

    Attributes:
        num_bytes: memory that it takes; 0 while it is not known.
        may_pass_later: whether it failed for want of room, not for what it is.
    """

    future: Future[LLMatcher] = field(default_factory=Future)
    num_bytes: int = 0
    may_pass_later: bool = False


class GrammarCompiler:
    """Compiles grammars for one checkpoint; equal ones once, while they are remembered.

    Tenants, by what their KV depends on besides tokens, take turns, and none finds what another one
    had compiled: it would say in no time what that one sent, and whoever asks first, behind much
    else, would hold up the others.

    Args:
        model_folder: of the checkpoint; its tokenizer is read when the first grammar comes.
        vocab_size: of the logits.
        eos_token_ids: are allowed where the output may end.

    All but the compiling is the engine's thread's.

    Attributes:
        on_ready: called, on any thread, when `take_ready` has something.
    """

    def __init__(self, model_folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._path = model_folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._trials = GrammarTrials(model_folder, eos_token_ids)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._loop: asyncio.AbstractEventLoop | None = None  # of the trials; on its own thread
        # Least recently used first.
        self._cache: OrderedDict[tuple[str, StructuredOutput], _Compiled] = OrderedDict()
        self._ready: deque[tuple[Request, Future[LLMatcher]]] = deque()

    def submit(self, request: Request) -> None:
        """Compile a request's grammar; `take_ready` will have it."""
        structured_output = request.sampling_params.structured_output
        assert structured_output is not None

        def on_done(future: Future[LLMatcher]) -> None:
            self._ready.append((request, future))
            self.on_ready()

        caller = b"".join(request.extra_keys).hex()
        self._compile(structured_output, caller).add_done_callback(on_done)

    def take_ready(self) -> list[tuple[Request, Outcome]]:
        """What was compiled since the last call, or why it cannot be."""
        ready: list[tuple[Request, Outcome]] = []
        while self._ready:
            request, future = self._ready.popleft()
            ready.append((request, self._outcome(future, request.sampling_params)))
        return ready

    def compile_now(self, params: SamplingParams) -> GrammarState:
        """Compile while the caller waits; raises InvalidRequestError."""
        assert params.structured_output is not None
        outcome = self._outcome(self._compile(params.structured_output), params)
        if isinstance(outcome, InvalidRequestError):
            raise outcome
        return outcome

    def _outcome(self, future: Future[LLMatcher], params: SamplingParams) -> Outcome:
        error = future.exception()
        if isinstance(error, InvalidRequestError):
            return InvalidRequestError(
                error.field, error.problem
            )  # raised once, not time and again
        return GrammarState(future.result().deep_copy(), params, self._vocab_size)

    def _compile(self, structured_output: StructuredOutput, caller: str = "") -> Future[LLMatcher]:
        key = caller, structured_output
        compiled = self._cache.get(key)
        if compiled is None or compiled.may_pass_later:
            compiled = self._cache[key] = _Compiled()
            making = self._make_matcher(structured_output, compiled, caller)
            asyncio.run_coroutine_threadsafe(making, self._running_loop())
        self._cache.move_to_end(key)
        while len(self._cache) > MAX_CACHED or (
            len(self._cache) > 1
            and sum(one.num_bytes for one in self._cache.values()) > MAX_CACHED_BYTES
        ):
            self._cache.popitem(last=False)
        return compiled.future

    async def _make_matcher(
        self, structured_output: StructuredOutput, compiled: _Compiled, caller: str
    ) -> None:
        """Try it in a worker process; only what passes there is compiled in this one."""
        try:
            trial = await self._trials.run(structured_output, caller=caller)
            compiled.num_bytes = trial.num_bytes
            matcher = await self._on_thread(structured_output, trial.grammar)
        except InvalidRequestError as error:
            compiled.future.set_exception(error)
        except BatonError as error:  # too many wait, or no process: another time it may be well
            compiled.may_pass_later = True
            compiled.future.set_exception(InvalidRequestError("structured_output", str(error)))
        else:
            compiled.future.set_result(matcher)

    async def _on_thread(self, structured_output: StructuredOutput, grammar: str) -> LLMatcher:
        """Compile on one of the threads; the library lets go of the GIL."""

        def compile_it() -> LLMatcher:
            return compile_grammar(structured_output, grammar, self._load_tokenizer())

        before = threading.stack_size(_STACK_BYTES)  # of threads that begin from now on
        try:
            future = self._threads.submit(compile_it)
        finally:
            threading.stack_size(before)
        return await asyncio.wrap_future(future)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_grammar_tokenizer(self._path, self._eos_token_ids)
            return self._tokenizer

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the trials: begins with the first grammar, ends with this object."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._loop.run_forever, name="grammar-trials", daemon=True
            )
            thread.start()
            weakref.finalize(self, _stop, self._loop, thread)
        return self._loop


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
