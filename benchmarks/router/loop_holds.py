"""Measure which calls hold the interpreter long, with 262,144 tokens and the longest texts.

Each call runs on a thread beside another thread that wants the interpreter every half millisecond.
The output has the call's processor time and the longest wait of the other thread. That wait is
about the call's time if the call holds the GIL, else some milliseconds (the interpreter's
switches). Rows of `loop_holds_fleet.py` are rounds of an event loop.

    python -m benchmarks loop_holds --model FOLDER     (a folder that large_vocabulary.py made)
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.api.prompt import check_sampling_params
from baton.api.sampling_params import MAX_LISTED_TOKEN_IDS, SamplingParams
from baton.api.structured_output import StructuredOutput
from baton.text.chat_template import compile_chat_template
from baton.text.grammars import compile_grammar, load_grammar_tokenizer, make_grammar
from baton.text.tokenizer import Tokenizer
from benchmarks.router.large_vocabulary import NUM_TOKENS, make_model
from benchmarks.router.loop_holds_fleet import measure_fleet
from benchmarks.runner.run import Document, Run
from engine.core.grammar import GrammarState

Found = TypeVar("Found")
LIMIT_MS = 50.0


@dataclass(slots=True)
class Hold:
    """One measured call; ``where`` names the thread or loop on which Baton makes it."""

    call: str
    where: str
    cpu_ms: float
    held_ms: float


class Watch:
    """Measure calls, one after another."""

    def __init__(self) -> None:
        self.rows: list[Hold] = []

    def measure(self, call: str, where: str, make: Callable[[], Found]) -> Found:
        held, is_over = [0.0], threading.Event()

        def want() -> None:
            last = time.perf_counter()
            while not is_over.is_set():
                time.sleep(0.0005)
                now = time.perf_counter()
                held[0], last = max(held[0], now - last), now

        thread = threading.Thread(target=want)
        thread.start()
        began_at = time.thread_time()
        found = make()
        cpu_s = time.thread_time() - began_at
        is_over.set()
        thread.join()
        self.rows.append(Hold(call, where, round(1000 * cpu_s, 1), round(1000 * held[0], 1)))
        return found

    def note(self, call: str, where: str, seconds: float) -> None:
        """Add a row of a call that was measured elsewhere, and held its loop all the while."""
        held_ms = round(1000 * seconds, 1)
        self.rows.append(Hold(call, where, held_ms, held_ms))


def measure_all(folder: Path) -> list[Hold]:
    watch = Watch()
    of_grammars(watch, folder)
    of_texts(watch, folder)
    of_parameters(watch)
    measure_fleet(watch.note)
    return watch.rows


def of_grammars(watch: Watch, folder: Path) -> None:
    measure, path = watch.measure, folder / "tokenizer.json"
    tokenizer = measure(
        "LLTokenizer", "node, before it joins; template", lambda: load_grammar_tokenizer(path)
    )
    choices = tuple(f"{number:04d}{'xy' * 20}" for number in range(1000))
    for name, asked in {
        "choice of 1,000 texts": StructuredOutput(choice=choices),
        "dear regex": StructuredOutput(regex=r"(.|\n)*[a-m](.|\n){12}z"),
    }.items():
        grammar = measure(f"make_grammar, {name}", "worker", partial(make_grammar, asked))
        matcher = measure(
            f"compile_grammar, {name}",
            "worker; grammar thread",
            partial(compile_grammar, asked, grammar, tokenizer),
        )
        measure(f"copy of a matcher, {name}", "grammar thread", matcher.deep_copy)
        for _ in range(4):
            bits = measure(f"mask, {name}", "mask thread", matcher.compute_bitmask)
            allowed = [
                8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1
            ]
            matcher.consume_token(allowed[len(allowed) // 2])
    everything = SamplingParams(allowed_token_ids=tuple(range(MAX_LISTED_TOKEN_IDS)))
    matcher = compile_grammar(
        StructuredOutput(regex="[ab]"), make_grammar(StructuredOutput(regex="[ab]")), tokenizer
    )
    measure(
        "GrammarState, 4,096 allowed tokens (the most)",
        "grammar thread",
        lambda: GrammarState(matcher, everything, NUM_TOKENS),
    )


def of_texts(watch: Watch, folder: Path) -> None:
    measure = watch.measure
    tokenizer = measure("Tokenizer", "router, before it serves", lambda: Tokenizer(folder))
    measure("tables of pieces", "router's loop, once", lambda: tokenizer.pieces(frozenset()))
    ids = list(range(6, 1030))
    measure("decode of 1,024 tokens", "router's loop", lambda: tokenizer.decode(ids))
    measure("encode of 4,000 characters", "router's loop", lambda: tokenizer.encode("word " * 800))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" * 2000
    measure(
        "compile of a template of 100 kB", "worker", lambda: compile_chat_template(template, {})
    )
    body = json.dumps({"prompt": list(range(1_100_000))}).encode()
    measure(
        f"JSON of {len(body) / 2**20:.0f} MiB, as typed values",
        "router's loop",
        lambda: msgspec.json.decode(body, type=dict[str, list[int]]),
    )
    config = json.dumps({str(number): [number] * 10 for number in range(13_000)})
    measure(f"config of {len(config) / 1e6:.1f} MB", "before it serves", lambda: json.loads(config))


def of_parameters(watch: Watch) -> None:
    ids = tuple(range(MAX_LISTED_TOKEN_IDS))
    params = watch.measure(
        "SamplingParams, 4,096 banned tokens (the most)",
        "router's loop; node's loop",
        lambda: SamplingParams(banned_token_ids=ids),
    )
    watch.measure(
        "check_sampling_params of them",
        "router's loop",
        lambda: check_sampling_params(params, vocab_size=NUM_TOKENS),
    )


def run(run: Run, model: Path | None = None) -> Document:
    """Measure every call.

    Args:
        model: a folder with the model; one is made otherwise.
    """
    with tempfile.TemporaryDirectory() as temporary:
        rows = [asdict(row) for row in measure_all(model or make_model(Path(temporary)))]
    run.show(f"calls; held is too long above {LIMIT_MS} ms", rows)
    return {"calls": rows}
