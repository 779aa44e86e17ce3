"""Rows about what other programs say of Baton: lm-eval, and three generators of load."""

from __future__ import annotations

from tools.performance.rows import Area, Found, Json, Row, Source, at, number
from tools.performance.served import SERVED

WITHIN = 0.05  # of each other
MOST_LOGPROB_DIFFERENCE = 1e-4


# ---------------------------------------------------------------- load tests


_UNITS = {"ttft": "TTFT", "itl": "time per token after the first", "e2e": "E2E"}
_RATES = {
    "requests_per_s": "requests per second",
    "output_tokens_per_s": "output tokens per second",
}


def _agreement(load: str, key: str, what: str) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "loads", load, "medians", key)
        apart = number(row, "apart")
        values = " / ".join(f"{number(row, who):.4g}" for who in ("baton", "aiperf", "guidellm"))
        unit = " ms" if key.endswith("_ms") else ""
        return Found(f"{apart:.1%} ({values}{unit})", apart <= WITHIN)

    return Row(what=f"{load}: {what}", target=f"within {WITHIN:.0%}", measure=measure)


AGREEMENT = Source(
    name="loadtest_agreement",
    command="benchmarks/loadtest_agreement.py",
    intro="One load by `baton loadtest`, AIPerf and guidellm in turns: how far the largest of the"
    " three is above the smallest (Baton / AIPerf / guidellm, medians of the runs).",
    rows=tuple(
        row
        for load in ("4 requests/s", "4 at a time")
        for row in (
            *(
                _agreement(load, f"{name}_{which}_ms", f"{what}, {said}")
                for name, what in _UNITS.items()
                for which, said in (("mean", "mean"), ("p50", "median"))
            ),
            *(_agreement(load, key, what) for key, what in _RATES.items()),
        )
    ),
)


# ---------------------------------------------------------------- lm-eval


_TASKS = {
    "baton_choice": "choice of four answers, /v1/completions with echo",
    "baton_generation": "text, /v1/completions",
    "baton_chat": "text, /v1/chat/completions",
}


def _accuracy(task: str, what: str) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "tasks", task)
        [(name, ours)] = at(row, "baton").items()
        theirs = number(row, "transformers", name)
        otherwise = number(row, "num_judged_otherwise")
        text = f"{ours:.2f} / {theirs:.2f} of {number(row, 'num_items'):.0f} items"
        return Found(f"{text}, {otherwise:.0f} judged otherwise", ours == theirs and not otherwise)

    return Row(what=f"accuracy, {what}: Baton / transformers", target="equal", measure=measure)


def _logprobs(document: Json) -> Found:
    row = at(document, "tasks", "baton_choice")
    found = number(row, "largest_logprob_difference")
    text = f"{found:.1e} ({number(row, 'num_logprobs'):.0f} answers)"
    return Found(text, found <= MOST_LOGPROB_DIFFERENCE)


LM_EVAL = Source(
    name="lm_eval_agreement",
    command="benchmarks/lm_eval_agreement.py",
    intro="lm-eval on SmolLM2-135M-Instruct from one GGUF file, in float32: through a router, a"
    " prefill node and a decode node, and through `transformers`.",
    rows=(
        *(_accuracy(task, what) for task, what in _TASKS.items()),
        Row(
            what="log-likelihood of an answer, largest difference",
            target=f"<= {MOST_LOGPROB_DIFFERENCE:g}",
            measure=_logprobs,
        ),
    ),
)

AREAS = (
    Area(
        title="By other programs",
        sources=(AGREEMENT, LM_EVAL, SERVED),
        log=("2026-11-26: served over HTTP beside vLLM",),
    ),
)
