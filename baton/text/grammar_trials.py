"""GrammarTrials: compiles clients' grammars in worker processes, to limit their cost on nodes.

The cost of a grammar depends only on its text and the vocabulary, so a node needs about as much
time and memory for a grammar as the worker process.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.processes.early_template import EarlyTemplate, fork_template
from baton.processes.worker_processes import WorkerProcesses, WorkLimitError, WorkLimits
from baton.processes.worker_template import Work, resident_memory_bytes
from baton.text.grammars import (
    compile_grammar,
    library_errors,
    load_grammar_tokenizer,
    make_grammar,
)

# Limits of a trial. A schema with hundreds of properties takes hundredths of a second, and some
# megabytes.
LIMITS = WorkLimits(cpu_s=1.0, wall_s=30.0, memory_bytes=96 * 2**20)
# One grammar of each kind, which a worker compiles before the first request.
SMALL_GRAMMARS = (
    StructuredOutput(json_schema='{"type":"object","properties":{"a":{"type":"string"}}}'),
    StructuredOutput(regex="[a-z]{1,8}"),
    StructuredOutput(grammar='start: "a" | %json {"type":"integer"}'),
)

_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Trial:
    """A grammar that a worker process has compiled.

    Attributes:
        grammar: the grammar in the form that the grammar library takes.
        num_bytes: memory that the compiled grammar needs, in bytes.
    """

    grammar: str
    num_bytes: int


class GrammarTrials:
    """Trials of grammars for one checkpoint, in worker processes. Used on one event loop.

    Args:
        model_folder: the checkpoint's folder.
        eos_token_ids: ids of the tokens that may end an output.
        early: worker template from `fork_trials` or `EarlyGrammars`; None: start one when needed.
    """

    def __init__(
        self,
        model_folder: Path,
        eos_token_ids: Iterable[int] = (),
        early: EarlyTemplate | None = None,
    ) -> None:
        work = "baton.text.grammar_trials:make_work"
        options = _options(model_folder, eos_token_ids)
        self._workers = WorkerProcesses(work, options, LIMITS, early=early)

    def start(self) -> None:
        """Start the worker processes, which load the tokenizer.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        self._workers.start()

    async def prepare(self) -> None:
        """Start the workers, wait until they are ready, and compile a grammar of each kind.

        Raises:
            NodeUnavailableError: the processes cannot be started.
        """
        await self._workers.wait_ready()
        for structured_output in SMALL_GRAMMARS:
            # The grammar library does not know all kinds of tokenizers.
            with contextlib.suppress(InvalidRequestError):
                await self.run(structured_output)

    async def run(self, structured_output: StructuredOutput, *, caller: str = "") -> Trial:
        """Compile a grammar in a worker process, within limits.

        Raises the errors of `WorkerProcesses.run`, and InvalidRequestError if the grammar is wrong
        or costs too much.
        """
        kind = structured_output.kind
        work = msgspec.json.encode([kind, structured_output.text, structured_output.choice])
        try:
            answer = await self._workers.run(work, caller=caller)
        except WorkLimitError as error:
            problem = f"{error} to be compiled: large numbers, repeats and choices multiply"
            raise InvalidRequestError(f"structured_output.{kind}", problem) from None
        return Trial(answer[_SIZE.size :].decode(), _SIZE.unpack_from(answer)[0])

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()


@dataclass(frozen=True, slots=True)
class EarlyGrammars:
    """Tokenizer and worker template for grammars, made before the program starts threads.

    Attributes:
        tokenizer: tokenizer of the checkpoint, whose memory the template's workers share.
    """

    tokenizer: LLTokenizer
    template: EarlyTemplate


def fork_grammars(tokenizer: LLTokenizer) -> EarlyGrammars:
    """Fork a worker template for `GrammarTrials` that shares this tokenizer; raises OSError."""
    return EarlyGrammars(tokenizer, fork_template(lambda: _work_of(tokenizer)))


def fork_trials(model_folder: Path) -> EarlyTemplate:
    """Fork a worker template for `GrammarTrials` that loads the tokenizer; raises OSError."""
    return fork_template(lambda: make_work(_options(model_folder)))


def _options(model_folder: Path, eos_token_ids: Iterable[int] = ()) -> dict[str, str]:
    return {
        "tokenizer": str(model_folder / "tokenizer.json"),
        "eos_token_ids": " ".join(map(str, eos_token_ids)),
    }


def make_work(options: Mapping[str, str]) -> Work:
    """Load the tokenizer in a worker template, and return the function that compiles grammars."""
    eos_token_ids = map(int, options["eos_token_ids"].split())
    try:
        return _work_of(load_grammar_tokenizer(Path(options["tokenizer"]), eos_token_ids))
    except InvalidRequestError as error:
        problem = error.problem

        def refuse(work: bytes) -> bytes:
            raise InvalidRequestError("structured_output", problem)

        return refuse


def _work_of(tokenizer: LLTokenizer) -> Work:
    def work(frame: bytes) -> bytes:
        kind, text, choice = msgspec.json.decode(frame, type=tuple[str, str, tuple[str, ...]])
        given = {"choice": choice} if kind == "choice" else {kind: text or True}
        structured_output = StructuredOutput(**given)
        with library_errors(structured_output):
            grammar = make_grammar(structured_output)
        before = resident_memory_bytes()
        matcher = compile_grammar(structured_output, grammar, tokenizer)
        num_bytes = max(resident_memory_bytes() - before, 0)
        del matcher
        return _SIZE.pack(num_bytes) + grammar.encode()

    return work
