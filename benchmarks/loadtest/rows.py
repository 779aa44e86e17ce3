"""Rows of docs/performance.md about load tests, and about other programs' results on Baton."""

from __future__ import annotations

from benchmarks.page.measures import at, number, told
from benchmarks.page.rows import Found, Json, Measure, Measurement, Row, Source, Subject


def _shown(metric: str, name: str, unit: str, target: str = "") -> Row:
    """Return a row that passes if an interval of differences does not contain 0."""
    scale = 1e3 if unit == "ms" else 1.0

    def measure(document: Json) -> Found:
        verdict = at(document, "verdict")
        split, colocated = (
            number(document, "deployments", f"name={at(verdict, one)}", "metrics", metric, "mean")
            for one in ("split", "colocated")
        )
        found = number(verdict, "ratios", metric)
        low, high = (number(verdict, "differences", metric, end) * scale for end in ("low", "high"))
        text = f"{found:.2f} ({split * scale:,.2f} / {colocated * scale:,.2f} {unit};"
        text += f" difference {low:+,.2f} to {high:+,.2f})"
        if metric == "goodput_per_s" and "format" not in document:
            text += ", **by the old definition**: what ended in the window, whenever it was sent"
        return Found(text, high < 0)

    return Row(
        f"{name}: best split / best colocated",
        measure,
        target,
        "the interval contains 0, so the gain is not shown. Router, load generator and nodes"
        " share two cores, so waits for a core are part of the tail with and without a split.",
    )


def _kept_up(document: Json) -> Found:
    code = number(document, "exit_code")
    return Found("yes" if code == 0 else f"no (exit code {code:g})", code == 0)


COMPARE = Source("compare", (
    _shown("itl_p99_s", "ITL p99", "ms", "< 1, and all of the interval below 0"),
    _shown("ttft_p50_s", "TTFT p50", "ms"),
    _shown("ttft_p99_s", "TTFT p99", "ms"),
    _shown("goodput_per_s", "goodput", "requests/s"),
    Row("verdict by goodput", told("verdict", "{answer}: {split} against {colocated}")),
    Row("the load generator kept up", _kept_up, "yes",
        "it shares the cores with all other processes; its lag is part of these latencies."),
), "Long prompts on the demo model, the same requests and cores for each shape; differences"
   " have 95 % intervals.")  # fmt: skip


def _generator(streams: int, target: str = "") -> Row:
    return Row(
        f"lag p99 of the generator's loop, {streams:,} streams",
        told(
            f"runs > streams={streams}",
            "{loop_lag_ms[p99]:.1f} ms (median {loop_lag_ms[p50]:.1f} ms) at"
            " {output_tokens_per_s:,.0f} tokens/s, {core_share:.0%} of a core;"
            " {num_miscounted:.0f} requests miscounted",
            "loop_lag_ms > p99",
        ),
        target,
        "its core makes the frames of all streams that a decode step answers at once;"
        " the router and the simulated nodes have the other one.",
    )


LOAD_GENERATOR = Source(
    "load_generator",
    (_generator(500), _generator(1000), _generator(2000, "< 5 ms")),
    "A router and simulated nodes on one core, the generator on the other.",
)


def _agreement(load: str, key: str, what: str) -> Row:
    unit = " ms" if key.endswith("_ms") else ""
    form = "{apart:.1%} ({baton:.4g} / {aiperf:.4g} / {guidellm:.4g}" + unit + ")"

    def measure(document: Json) -> Found:
        row = at(document, "loads", load, "medians", key)
        return Found(form.format(**row), 100 * number(row, "apart") <= 5)

    return Row(f"{load}: {what}", measure, "within 5%")


_UNITS = {"ttft": "TTFT", "itl": "time per token after the first", "e2e": "E2E"}
_RATES = {
    "requests_per_s": "requests per second",
    "output_tokens_per_s": "output tokens per second",
}
AGREEMENT = Source(
    "loadtest_agreement",
    tuple(
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
    "One load by `baton loadtest`, AIPerf and guidellm in turns: how far the largest of the"
    " three is above the smallest (Baton / AIPerf / guidellm, medians of the runs).",
)


def _ratio_beside_images(case: str, name: str) -> Measure:
    def measure(document: Json) -> Found:
        found = number(document, "ratios", case, name)
        return Found(f"{found:.3f}", found)

    return measure


def _accuracy(task: str, what: str) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "tasks", task)
        [(name, ours)] = at(row, "baton").items()
        theirs = number(row, "transformers", name)
        otherwise = number(row, "num_judged_otherwise")
        text = f"{ours:.2f} / {theirs:.2f} of {number(row, 'num_items'):.0f} items"
        return Found(f"{text}, {otherwise:.0f} judged otherwise", ours == theirs and not otherwise)

    return Row(f"accuracy, {what}: Baton / transformers", measure, "equal")


def _logprobs(document: Json) -> Found:
    row = at(document, "tasks > baton_choice")
    found = number(row, "largest_logprob_difference")
    return Found(f"{found:.1e} ({number(row, 'num_logprobs'):.0f} answers)", found <= 1e-4)


LM_EVAL = Source(
    "lm_eval_agreement",
    (
        _accuracy("baton_choice", "choice of four answers, /v1/completions with echo"),
        _accuracy("baton_generation", "text, /v1/completions"),
        _accuracy("baton_chat", "text, /v1/chat/completions"),
        Row("log-likelihood of an answer, largest difference", _logprobs, "<= 0.0001"),
    ),
    "lm-eval on SmolLM2-135M-Instruct from one GGUF file, in float32: through a router, a"
    " prefill node and a decode node, and through `transformers`.",
)
IMAGES = Source(
    "text_beside_images",
    tuple(
        Row(
            f"{what}, {case}, divided by that without images",
            _ratio_beside_images(case, name),
            limit,
        )
        for case, limit in (
            ("images on an encode node", "<= 1.05"),
            ("images on the prefill node", ""),
        )
        for name, what in (("itl_p99_ms", "ITL p99"), ("ttft_p99_ms", "TTFT p99"))
    ),
    "Text requests, while some of the other requests have images: a random model with"
    " SmolVLM-256M's widths, a prefill node, a decode node and, in one case, an encode node.",
    absent="no run was saved yet",
)


def _tuned(load: str) -> Row:
    """Return a row that passes if a search has ended and its file starts a deployment."""

    def measure(document: Json) -> Found:
        found = at(document, "loads", load)
        usual = f"defaults {number(found, 'default_goodput'):.2f} requests/s within the SLO"
        if not found["wins"]:
            cut = f", cut after {len(found['trials'])} trials" if found["was_cut"] else ""
            text = (
                f"no setting beats the defaults ({usual}, noise {number(found, 'noise'):.2f}{cut})"
            )
            return Found(text, not found["was_cut"])
        low, mean, high = (number(found, "gain", end) for end in ("low", "mean", "high"))
        text = f"{mean:+.2f} requests/s ({low:+.2f} to {high:+.2f}; {usual}) with"
        return Found(f"{text} `{found['best_text']}`", bool(found["starts"]))

    return Row(
        f"{load}: goodput of the found settings minus the defaults'", measure, "found or denied"
    )


TUNING = Source(
    "tuning",
    tuple(map(_tuned, ("chats", "long prompts", "long answers"))),
    "`baton loadtest tune` with SmolLM2-135M-Instruct, each load at one rate; differences have 95 %"
    " intervals.",
    absent="no run was saved yet",
)
SUBJECT = Subject(
    "Load tests and other programs",
    (
        Measurement("loadtest.split_or_not", "loadtest engine/core router/policies", (COMPARE,)),
        Measurement("loadtest.load_generator", "loadtest", (LOAD_GENERATOR,)),
        Measurement("loadtest.loadtest_agreement", "loadtest", (AGREEMENT,)),
        Measurement("loadtest.tuning", "loadtest/tuning engine/core router/policies", (TUNING,)),
        Measurement("loadtest.lm_eval_agreement", "models router/intake", (LM_EVAL,)),
        Measurement(
            "loadtest.text_beside_images", "encode_node engine/core/images router/fleet", (IMAGES,)
        ),
    ),
    log=(
        "2026-11-21: colocated against split on two cores that others used too",
        "2026-11-21: how many streams one load generator holds",
    ),
    notes=("What the shapes are, and how the verdict is reached: [loadtest.md](loadtest.md).",),
)
