"""Grammar: which tokens a request's output may go on with. Its state follows from the output alone.

`GrammarCompiler` makes one per request, on threads of its own; `GrammarState` is asked for the
tokens allowed next and told which was taken. Only here does the engine meet llguidance. Knows no
queue and no step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

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
from engine.request import Request

NUM_THREADS = 2
MAX_CACHED = 128
_STUCK = "structured_output: no token is left that the grammar, the bans and the limits allow"


class GrammarState:
    """Where one request's output is in its grammar.

    Args:
        matcher: at the beginning; this one's own.
        params: whose bans hold as well.
        vocab_size: of the logits; tokens that the tokenizer does not have are never allowed.

    Attributes:
        problem: why no token can follow; empty while one can.
    """

    def __init__(self, matcher: LLMatcher, params: SamplingParams, vocab_size: int) -> None:
        self.problem = ""
        self._matcher = matcher
        self._permitted = _permitted_bits(params, vocab_size)

    def allowed_bits(self) -> NDArray[np.uint8]:
        """The tokens that may come next, one bit each, low bits first: `[ceil(vocab_size / 8)]`.

        All of them when there is none: `problem` says so, and `accept` will take no token.
        """
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = found[: len(self._permitted)]
        bits = np.zeros_like(self._permitted)
        if self._matcher.is_error():
            self.problem = f"structured_output: {_one_line(self._matcher.get_error())}"
        else:
            bits[: len(found)] = found & self._permitted[: len(found)]
            if not bits.any():
                self.problem = _STUCK
        return np.full_like(bits, 0xFF) if self.problem else bits

    def accept(self, token_id: int) -> bool:
        """Go on with a token of the output; False when it must not be there."""
        if not self.problem and not self._matcher.consume_token(token_id):
            self.problem = f"structured_output: {_one_line(self._matcher.get_error())}"
        return not self.problem

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return not self.problem and self._matcher.is_stopped()


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
                    raise InvalidRequestError("structured_output", _one_line(problem)) from None
                self._tokenizer = tokenizer
            return self._tokenizer


def allowed_token_masks(
    requests: Sequence[Request], vocab_size: int, device: torch.device
) -> dict[int, Tensor]:
    """Which tokens grammars allow, by the row of each request that has one: `[vocab_size]` bool."""
    rows = {i: r.grammar for i, r in enumerate(requests) if r.grammar is not None}
    if not rows:
        return {}
    # Packed to the device and unpacked there: an eighth of the bytes.
    packed = np.stack([grammar.allowed_bits() for grammar in rows.values()])
    bits = torch.from_numpy(packed).to(device)  # [num_grammars, ceil(vocab_size / 8)] uint8
    values = torch.arange(256, device=device).unsqueeze(1)
    unpacked = (values >> torch.arange(8, device=device) & 1).bool()  # [256, 8]
    masks = unpacked[bits.long()].flatten(1)[:, :vocab_size]
    return dict(zip(rows, masks, strict=True))


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


def _permitted_bits(params: SamplingParams, vocab_size: int) -> NDArray[np.uint8]:
    """One bit per token of the logits that a request does not ban itself."""
    permitted = np.ones(vocab_size, dtype=np.bool_)
    if params.allowed_token_ids is not None:
        permitted[:] = False
        permitted[list(params.allowed_token_ids)] = True
    permitted[list(params.banned_token_ids)] = False
    return np.packbits(permitted, bitorder="little")


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:200]
