"""Rows of the page about the engine: scheduler, steps, sampling, drafts."""

from __future__ import annotations

import contextlib

from benchmarks.page.rows import (
    Found,
    Json,
    Measure,
    Measurement,
    Row,
    Source,
    Subject,
    at,
    judge,
    number,
    ratio,
    value,
)

MOST_OUTSIDE = 0.10
MOST_CHANGED_PER_MILLION = 10.0


def _step(subject: str, case: str = "nobody waits") -> tuple[str, ...]:
    return ("steps", case, subject, "step_us", "median")


SCHEDULER = Source(
    "scheduler",
    (
        Row("a step", value(*_step("baton"), form="{:.0f} us", most=1000.0), "<= 1,000 us"),
        Row(
            "a step with 10,000 waiting / with none",
            ratio(
                _step("baton", "10,000 wait"),
                _step("baton"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
                most=1.1,
            ),
            "<= 1.1",
        ),
        Row(
            "a step / nano-vllm's",
            ratio(
                _step("baton"),
                _step("nano-vllm"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
                most=1.0,
            ),
            "<= 1",
            "an output record per token, which nano-vllm does not make; that was put"
            " together from public copies, see the log.",
            unmeasured="needs `--nano-vllm PATH`; 1.15 in the log, which is missed.",
        ),
        Row(
            "a step / a minimal scheduler's without prefix cache, priorities and remote KV",
            ratio(
                _step("baton"),
                _step("minimal (baseline)"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
            ),
        ),
        Row(
            "block pool, allocate and release: blocks per second / a bare deque's",
            ratio(
                ("block_pool_thousand_blocks_per_s", "allocate + release", "baton", "median"),
                ("block_pool_thousand_blocks_per_s", "allocate + release", "minimal", "median"),
                form="{ratio:.2f}",
            ),
        ),
    ),
    "Schedule and update of a step, 256 requests decoding.",
)


def _outside(sampling: str, batch: int) -> Row:
    """Judge the fastest tenth of the steps, as a busy machine distorts the others."""
    limit = MOST_OUTSIDE if batch == 32 else None

    def measure(document: Json) -> Found:
        row = at(document, "decode", f"{sampling}, batch {batch}")
        share = number(row, "share_outside_in_fastest_tenth")
        return Found(f"{100 * share:.1f} %", judge(share, None, limit, None))

    return Row(
        f"{sampling}, batch {batch}",
        measure,
        f"<= {100 * limit:g} %" if limit else "",
        "many small array operations, which cost as much for small models as large.",
    )


OVERHEAD = Source(
    "engine_overhead",
    tuple(
        _outside(sampling, batch)
        for batch in (1, 8, 32)
        for sampling in ("greedy", "random", "top-k, top-p")
    ),
    "Share of a decode step that is not the model (schedule, batch, plan, sampling, update),"
    " in the fastest tenth of the steps.",
)


def _host(what: str, target: float | None, *path: str, holds_back: str = "") -> Row:
    def measure(document: Json) -> Found:
        found = number(document, "now", *path)
        text = f"{found:g}"
        with contextlib.suppress(KeyError):  # a part that came with the revision
            text += f" (before: {number(document, 'before', *path):g})"
        return Found(text, judge(found, None, target, None))

    return Row(what, measure, "" if target is None else f"<= {target:g}", holds_back)


HOST = Source("host_overhead", (
        _host(
            "launches of an eager layer (prompt chunk), us of host", 45,
            "eager layer us", "prompt chunk of 128", "launches", "median",
            holds_back="Each op still makes its results and looks at shapes in Python."
        ),
        _host(
            "an eager layer (prompt chunk) with its modules, us of host", None,
            "eager layer us", "prompt chunk of 128", "whole", "median"
        ),
        _host(
            "the model runner in a decode step of 256 requests, us of host", 400,
            "decode step us", "batch 256", "runner", "median",
            holds_back="Python that looks at each request once."
        ),
        _host(
            "a layer of a prompt chunk that is replayed, with its share of the step, us of host",
            None, "eager layer us", "the prompt's step, replayed", "median"
        ),
        _host(
            "share of time that the device waits, another thread computing in bursts of 2 ms", None,
            "idle share", "switch interval 5 ms", "bursts of 2 ms"
        ),
        _host(
            "a whole decode step of 256 requests, us of host", None,
            "decode step us", "batch 256", "whole", "median"
        ),
        _host("graph nodes per layer", 9, "graph nodes", "per layer")
    ), "The host's part of steps on a GPU, over a driver that only counts: Python and Triton's"
    " launch code are real, products of matrices and the device are not there. CPU time, the"
    " least of the rounds' medians.",
    absent="It is to be measured where nothing else runs.")  # fmt: skip


def _changed(case: str, *, has_target: bool) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "results", case)
        draws, changed = number(row, "draws"), number(row, "changed")
        rate = changed / draws * 1e6
        most = MOST_CHANGED_PER_MILLION if has_target else None
        return Found(
            f"{rate:.1f} per million ({changed:.0f} of {draws:,.0f})", judge(rate, None, most, None)
        )

    return Row(case, measure, f"<= {MOST_CHANGED_PER_MILLION:g} per million" if has_target else "")


STABILITY = Source(
    "sampling_stability",
    (
        _changed("demo model, Gumbel-max", has_target=True),
        _changed("demo model, inverse transform", has_target=False),
        _changed("flat, 4096 tokens, Gumbel-max", has_target=True),
        _changed("flat, 151936 tokens, Gumbel-max", has_target=True),
        _changed("two schedules, Gumbel-max", has_target=True),
    ),
    "Draws that another rounding of the logits changes.",
)


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
                f", {number(row, 'acceptance_length'):.2f} tokens a step with drafts, which "
                f"{number(row, 'share_computed'):.0%} of the steps have, and a step takes "
                f"{number(row, 'step_cost'):.2f} of one without"
            )
        text += ")" if row["equal"] else "), and other tokens"
        return Found(text, None if least is None else ratio >= least and bool(row["equal"]))

    return measure


def _adaptive(part: str, name: str, batch: int, least: float | None, holds_back: str = "") -> Row:
    return Row(
        f"{name}, batch {batch}",
        _ratio(part, f"{name}, as many as pay", batch, least),
        "" if least is None else f">= {least:g}",
        holds_back,
    )


def _plain(part: str, name: str) -> Row:
    return Row(f"{name}, batch 1", _ratio(part, name, 1, None))


OF_A_TRAINED_ONE = (
    "a step of the demo model takes a millisecond, so drafting and verifying take longer"
    " than the step; Medusa's heads are right too seldom."
)


OF_FOUR_BITS = (
    "half of the steps find nothing to draft from, and six tokens take 1.5 steps, as products"
    " take the time and no longer reading; in float32 the target holds."
)


OF_PROMPTS = "a layer that drafts later reads prompts when they are computed."


SPECULATION = Source(
    "speculation",
    (
        *(_adaptive(task, task, 1, LEAST_NGRAM, OF_FOUR_BITS) for task in TASKS),
        *(_plain(task, f"{task}, all drafts") for task in TASKS),
        *(_adaptive(task, f"{task}, float32 weights", 1, None) for task in TASKS),
        *(_plain("transformers", f"transformers: {task}") for task in TASKS),
        *(_adaptive(task, task, 32, LEAST_OFF) for task in TASKS),
        *(
            _adaptive(method, f"demo model, {method}", 1, LEAST_TRAINED, OF_A_TRAINED_ONE)
            for method in TRAINED
        ),
        *(_plain(method, f"demo model, {method}, all drafts") for method in TRAINED),
        *(
            _adaptive(method, f"demo model, {method}", 32, LEAST_OFF, OF_PROMPTS)
            for method in TRAINED
        ),
        _plain("transformers", "transformers: demo model, assisted"),
        _plain("transformers", "transformers: demo model, prompt lookup"),
    ),
    "Tokens per second with drafts over without, in turns within one run, greedy: `ngram`"
    " with SmolLM2-135M-Instruct, whose weights have 4 bits (in float32 where it says so);"
    " trained heads and layers with the demo model. As many drafts as pay, unless a row says all.",
)


SUBJECT = Subject(
    "Scheduler and engine",
    (
        Measurement("benchmarks.engine.scheduler", "engine/core", (SCHEDULER,)),
        Measurement("benchmarks.engine.engine_overhead", "engine/core engine/worker", (OVERHEAD,)),
        Measurement(
            "benchmarks.engine.host_overhead",
            "engine/worker kernels/baton_kernels/triton models/layers",
            (HOST,),
        ),
        Measurement(
            "benchmarks.engine.sampling_stability",
            "kernels/baton_kernels/reference.py engine/worker",
            (STABILITY,),
        ),
        Measurement(
            "benchmarks.engine.speculation",
            "engine/speculation engine/core/drafts.py",
            (SPECULATION,),
        ),
    ),
    log=(
        "2026-11-21: a scheduler step in a third of the time",
        "2026-11-21: rows that stay, and draws without a float64 vocabulary",
        "2026-11-21: top-k and top-p without a sort of the vocabulary",
        "2026-11-21: draws that rounding hardly moves",
        "2026-11-21: what a grammar costs, and what it takes to break its reader",
        "2026-11-26: guesses that pay are found, those that do not cost less",
        "2026-11-26: what guesses save on a CPU",
    ),
    notes=("What drafts, and how many tokens: [speculation.md](speculation.md).",),
)
