"""GrammarCompiler: from what a request asks for to the state of its grammar, off the step loop.

On threads of its own; equal grammars once. Knows no queue and no step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.errors import InvalidRequestError
from baton.grammars import (
    GrammarThreads,
    invalid_grammar,
    library_errors,
    make_grammar,
    parser_limits,
)
from baton.sampling_params import SamplingParams
from baton.structured_output import StructuredOutput
from engine.grammar import GrammarState, one_line
from engine.request import Request

NUM_THREADS = 2
MAX_CACHED = 128

Outcome = GrammarState | InvalidRequestError


class GrammarCompiler:
    """Compiles grammars for one checkpoint; equal ones once, while they are remembered.

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
        self._threads = GrammarThreads(NUM_THREADS)
        # Least recently used first. What failed is remembered, too.
        self._cache: OrderedDict[StructuredOutput, Future[LLMatcher]] = OrderedDict()
        self._ready: deque[tuple[Request, Future[LLMatcher]]] = deque()

    def submit(self, request: Request) -> None:
        """Compile a request's grammar; `take_ready` will have it."""
        structured_output = request.sampling_params.structured_output
        assert structured_output is not None

        def on_done(future: Future[LLMatcher]) -> None:
            self._ready.append((request, future))
            self.on_ready()

        self._compile(structured_output).add_done_callback(on_done)

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

    def _compile(self, structured_output: StructuredOutput) -> Future[LLMatcher]:
        future = self._cache.get(structured_output)
        if future is None:
            future = self._threads.submit(self._make_matcher, structured_output)
            self._cache[structured_output] = future
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(structured_output)
        return future

    def _make_matcher(self, structured_output: StructuredOutput) -> LLMatcher:
        with library_errors(structured_output):
            matcher = LLMatcher(
                self._load_tokenizer(),
                make_grammar(structured_output),
                log_level=0,
                limits=parser_limits(),
            )
            problem = _problem_at_start(matcher)
        if problem:
            raise invalid_grammar(structured_output, problem)
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                if not self._path.is_file():
                    raise InvalidRequestError(
                        "structured_output", "this checkpoint has no tokenizer.json"
                    )
                try:
                    tokenizer = LLTokenizer(str(self._path))
                    known = [i for i in sorted(self._eos_token_ids) if i < tokenizer.vocab_size]
                    if known:
                        tokenizer = LLTokenizer(str(self._path), eos_token=known)
                except Exception as error:  # the library raises nothing better
                    problem = f"this checkpoint's tokenizer.json cannot be used: {error}"
                    raise InvalidRequestError("structured_output", one_line(problem)) from None
                self._tokenizer = tokenizer
            return self._tokenizer


def _problem_at_start(matcher: LLMatcher) -> str:
    """Why no output can begin; empty if one can.

    The first masks cost the most, and show most of what is too complex: so not in a step.
    """
    first = matcher.compute_bitmask()
    if not matcher.is_error() and not any(first):
        return "no output of this model can match it"
    ahead = matcher.deep_copy()
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(first, np.uint8), bitorder="little"))
    if len(allowed) and ahead.consume_token(int(allowed[0])):
        ahead.compute_bitmask()
    return ahead.get_error()
