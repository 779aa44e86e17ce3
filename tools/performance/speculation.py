"""Rows about guesses of next tokens: what they save, and what they cost where they do not pay."""

from __future__ import annotations

from tools.performance.rows import Area, Found, Json, Measure, Row, Source, at, number

LEAST_NGRAM = 1.8
LEAST_TRAINED = 1.5
LEAST_OFF = 0.98  # at batch 32
TASKS = ("editing code", "summarising")
TRAINED = ("medusa", "eagle", "mtp")


def _row(document: Json, part: str, name: str, batch: int) -> Json:
    for row in at(document, "parts", part, "rows"):
        if row["name"] == name and row["batch"] == batch:
            return row
    raise LookupError(f"{name}, batch {batch}")


def _ratio(part: str, name: str, batch: int, least: float | None) -> Measure:
    def measure(document: Json) -> Found:
        row = _row(document, part, name, batch)
        ratio = number(row, "ratio")
        text = f"{ratio:.2f} ({number(row, 'tokens_per_s'):.0f} tokens/s"
        if not name.startswith("transformers"):
            text += (
                f", {number(row, 'acceptance_length'):.2f} tokens a step with guesses, which "
                f"{number(row, 'share_computed'):.0%} of the steps have, and a step takes "
                f"{number(row, 'step_cost'):.2f} of one without"
            )
        text += ")" if row["equal"] else "), and other tokens"
        return Found(text, None if least is None else ratio >= least and bool(row["equal"]))

    return measure


def _adaptive(part: str, name: str, batch: int, least: float | None, holds_back: str = "") -> Row:
    return Row(
        what=f"{name}, batch {batch}",
        target="" if least is None else f">= {least:g}",
        measure=_ratio(part, f"{name}, as many as pay", batch, least),
        holds_back=holds_back,
    )


def _plain(part: str, name: str) -> Row:
    return Row(what=f"{name}, batch 1", measure=_ratio(part, name, 1, None))


OF_A_TRAINED_ONE = (
    "a step of the demo model takes a millisecond, so guessing, and looking at guesses, takes"
    " more than it; Medusa's heads are right too seldom."
)
OF_FOUR_BITS = (
    "half of the steps find nothing to guess by, and six tokens take 1.5 steps where products and"
    " no longer reading take the time; in float32 it holds."
)
OF_PROMPTS = "a layer that is to guess later reads prompts when they are computed."
SPECULATION = Source(
    name="speculation",
    command="benchmarks/speculation.py",
    intro="Tokens per second with guesses over without, in turns within one run, greedy: `ngram`"
    " with SmolLM2-135M-Instruct, whose weights have 4 bits (in float32 where it says so);"
    " trained heads and layers with the demo model. As many guesses as pay, unless it says all.",
    rows=(
        *(_adaptive(task, task, 1, LEAST_NGRAM, OF_FOUR_BITS) for task in TASKS),
        *(_plain(task, f"{task}, all guesses") for task in TASKS),
        *(_adaptive(task, f"{task}, float32 weights", 1, None) for task in TASKS),
        *(_plain("transformers", f"transformers: {task}") for task in TASKS),
        *(_adaptive(task, task, 32, LEAST_OFF) for task in TASKS),
        *(
            _adaptive(method, f"demo model, {method}", 1, LEAST_TRAINED, OF_A_TRAINED_ONE)
            for method in TRAINED
        ),
        *(_plain(method, f"demo model, {method}, all guesses") for method in TRAINED),
        *(
            _adaptive(method, f"demo model, {method}", 32, LEAST_OFF, OF_PROMPTS)
            for method in TRAINED
        ),
        _plain("transformers", "transformers: demo model, assisted"),
        _plain("transformers", "transformers: demo model, prompt lookup"),
    ),
)

AREAS = (
    Area(
        title="Guesses of next tokens",
        sources=(SPECULATION,),
        log=(
            "2026-11-26: guesses that pay are found, those that do not cost less",
            "2026-11-26: what guesses save on a CPU",
        ),
        notes=("What guesses, and how many are computed: [speculation.md](speculation.md).",),
    ),
)
