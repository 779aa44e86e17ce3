"""Rows of docs/performance.md about the engine: scheduler, steps, sampling, drafts."""

from __future__ import annotations

import contextlib

from benchmarks.page.measures import at, number, ratio, told, value
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject


def _step(subject: str, case: str = "nobody waits") -> str:
    return f"steps > {case} > {subject} > step_us > median"


_POOL = "block_pool_thousand_blocks_per_s > allocate + release"
SCHEDULER = Source("scheduler", (
    Row("a step", value(_step("baton"), "{:.0f} us"), "<= 1,000 us"),
    Row("a step with 10,000 waiting / with none",
        ratio(_step("baton", "10,000 wait"), _step("baton"), ".0f", " us"), "<= 1.1"),
    Row("a step / nano-vllm's", ratio(_step("baton"), _step("nano-vllm"), ".0f", " us"), "<= 1",
        "an output record per token, which nano-vllm does not make; that was put"
        " together from public copies, see the log.",
        "needs `--nano-vllm PATH`; 1.15 in the log, which is missed."),
    Row("a step / a minimal scheduler's without prefix cache, priorities and remote KV",
        ratio(_step("baton"), _step("minimal (baseline)"), ".0f", " us")),
    Row("block pool, allocate and release: blocks per second / a bare deque's",
        ratio(f"{_POOL} > baton > median", f"{_POOL} > minimal > median", "")),
), "Schedule and update of a step, 256 requests decoding.")  # fmt: skip
OVERHEAD = Source("engine_overhead", tuple(
    # The fastest tenth of the steps is judged, because a busy machine distorts the other steps.
    Row(f"{sampling}, batch {batch}",
        value(f"decode > {sampling}, batch {batch} > share_outside_in_fastest_tenth",
              "{:.1f} %", scale=100),
        "<= 10 %" if batch == 32 else "",
        "many small array operations, whose time does not depend on the model's size.")
    for batch in (1, 8, 32)
    for sampling in ("greedy", "random", "top-k, top-p")
), "Share of a decode step's time that is spent outside the model (schedule, batch, plan,"
   " sampling, update), in the fastest tenth of the steps.")  # fmt: skip


def _host(what: str, target: str, place: str, holds_back: str = "") -> Row:
    def measure(document: Json) -> Found:
        found = number(document, "now", place)
        text = f"{found:g}"
        with contextlib.suppress(KeyError):  # the older revision lacks this part
            text += f" (before: {number(document, 'before', place):g})"
        return Found(text, found)

    return Row(what, measure, target, holds_back)


_CHUNK, _BATCH = "eager layer us > prompt chunk of 128", "decode step us > batch 256"
HOST = Source("host_overhead", (
    _host("launches of an eager layer (prompt chunk), us of host", "<= 45",
          f"{_CHUNK} > launches > median",
          "Each op still makes its results and looks at shapes in Python."),
    _host("an eager layer (prompt chunk) with its modules, us of host", "",
          f"{_CHUNK} > whole > median"),
    _host("the model runner in a decode step of 256 requests, us of host", "<= 400",
          f"{_BATCH} > runner > median", "Python that looks at each request once."),
    _host("a layer of a prompt chunk that is replayed, with its share of the step, us of host", "",
          "eager layer us > the prompt's step, replayed > median"),
    _host("share of time that the device waits; another thread computes in bursts of 2 ms", "",
          "idle share > switch interval 5 ms > bursts of 2 ms"),
    _host("a whole decode step of 256 requests, us of host", "", f"{_BATCH} > whole > median"),
    _host("graph nodes per layer", "<= 9", "graph nodes > per layer")
), "Host time of steps on a GPU, with a driver that only counts launches: Python and Triton's"
   " launch code are real, matrix products and the device are absent. CPU time, the least of the"
   " rounds' medians.",
   absent="it must be measured on a machine where nothing else runs")  # fmt: skip


def _changed(case: str, target: str = "<= 10 per million") -> Row:
    def measure(document: Json) -> Found:
        draws, changed = (number(document, "results", case, name) for name in ("draws", "changed"))
        rate = changed / draws * 1e6
        return Found(f"{rate:.1f} per million ({changed:.0f} of {draws:,.0f})", rate)

    return Row(case, measure, target)


STABILITY = Source(
    "sampling_stability",
    (
        _changed("demo model, Gumbel-max"),
        _changed("demo model, inverse transform", ""),
        _changed("flat, 4096 tokens, Gumbel-max"),
        _changed("flat, 151936 tokens, Gumbel-max"),
        _changed("two schedules, Gumbel-max"),
    ),
    "Share of draws that change if logits are rounded differently.",
)


def _drafts(
    part: str, name: str, batch: int = 1, target: str = "", holds_back: str = "", how: str = ""
) -> Row:
    """Make the row of a comparison with and without drafts; if tokens differ, its figure is 0."""

    def measure(document: Json) -> Found:
        row = at(document, "parts", part, "rows", f"name={name}{how}, batch={batch}")
        found = number(row, "ratio")
        text = f"{found:.2f} ({number(row, 'tokens_per_s'):.0f} tokens/s"
        if not name.startswith("transformers"):
            text += (
                f"; {number(row, 'share_computed'):.0%} of the steps check drafts and give a "
                f"request {number(row, 'acceptance_length'):.2f} tokens; the mean step takes "
                f"{number(row, 'step_cost'):.2f} times as long as without drafting"
            )
        return Found(f"{text})", found) if row["equal"] else Found(f"{text}), and other tokens", 0)

    return Row(f"{name}, batch {batch}", measure, target, holds_back)


def _adaptive(part: str, name: str, batch: int, target: str = "", holds_back: str = "") -> Row:
    return _drafts(part, name, batch, target, holds_back, ", as many as pay")


TASKS, TRAINED = ("editing code", "summarising"), ("medusa", "eagle", "mtp")
OF_A_TRAINED_ONE = (
    "a step of the demo model takes a millisecond, so drafting and verifying take longer"
    " than the step; Medusa's heads are right too seldom."
)
OF_FOUR_BITS = (
    "half of the steps find nothing to draft from, and a step of six tokens takes 1.5 times as"
    " long as one of a single token, because products take longer than reading the weights; in"
    " float32 the target holds."
)
OF_PROMPTS = "a layer that drafts later reads prompts when they are computed."
SPECULATION = Source("speculation", (
    *(_adaptive(task, task, 1, ">= 1.8", OF_FOUR_BITS) for task in TASKS),
    *(_drafts(task, f"{task}, all drafts") for task in TASKS),
    *(_adaptive(task, f"{task}, float32 weights", 1) for task in TASKS),
    *(_drafts("transformers", f"transformers: {task}") for task in TASKS),
    *(_adaptive(task, task, 32, ">= 0.98") for task in TASKS),
    *(_adaptive(one, f"demo model, {one}", 1, ">= 1.5", OF_A_TRAINED_ONE) for one in TRAINED),
    *(_drafts(one, f"demo model, {one}, all drafts") for one in TRAINED),
    *(_adaptive(one, f"demo model, {one}", 32, ">= 0.98", OF_PROMPTS) for one in TRAINED),
    _drafts("transformers", "transformers: demo model, assisted"),
    _drafts("transformers", "transformers: demo model, prompt lookup"),
), "Tokens/s with drafts divided by tokens/s without, in turns within one run, greedy: `ngram`"
   " with SmolLM2-135M-Instruct, whose weights have 4 bits unless a row says float32; trained"
   " heads and layers with the demo model. The engine makes as many drafts as pay off, except in"
   " rows with \"all drafts\".")  # fmt: skip


def _waste(workload: str, target: str = "", holds_back: str = "") -> Row:
    place = f"parts > memory > results > {workload}"
    return Row(
        f"KV memory without a token, blocks of 16, lengths of {workload}",
        told(place, "{waste:.1%} ({running:.0f} requests run)", "waste"),
        target,
        holds_back,
    )


def _reserved(workload: str, name: str) -> Row:
    place = f"parts > memory > results > {workload} > reservations > {name}"
    return Row(
        f"KV memory without a token, contiguous, reserved: {name}, lengths of {workload}",
        told(place, "{waste:.1%} ({running:.0f} requests run)"),
    )


def _faster(what: str, place: str, above: str, under: str, target: str = "") -> Row:
    rows = f"parts > {place}"
    return Row(
        what,
        ratio(f"{rows} > {above} > tokens_per_s", f"{rows} > {under} > tokens_per_s", ".0f",
              " tokens/s"),
        target,
    )  # fmt: skip


_RESERVED = (
    "the model's limit",
    "the next power of two of the output",
    "exactly the output, known in advance",
)
_ROOM = "continuous, more requests in blocks"
CLAIMS = Source("claims", (
    _waste("ShareGPT", "< 0.05"),
    *(_reserved("ShareGPT", name) for name in _RESERVED),
    _waste("Alpaca", "", "requests of 78 tokens on average fill five blocks, the last one half."),
    *(_reserved("Alpaca", name) for name in _RESERVED),
    *(row for model in ("demo", "smollm2") for row in (
        _faster(f"{model}: continuous batching in blocks / padded static batches in reservations",
                f"batching > results > {model}", _ROOM, "static, padded", ">= 2"),
        _faster(f"{model}: continuous batching alone / padded static batches",
                f"batching > results > {model}", "continuous", "static, padded"),
        _faster(f"{model}: continuous batching alone / static batches that shrink",
                f"batching > results > {model}", "continuous", "static"),
    )),
    *(_faster(f"{model}, batch {batch}: decode steps from tapes / without",
              f"tapes > results > {model} > batch {batch}", "on", "off")
      for model in ("demo", "smollm2") for batch in (1, 8, 32)),
    *(_faster(f"{model}, batch {batch}: decode steps from CUDA graphs / without",
              f"graphs > results > {model} > batch {batch}", "on", "off")
      for model in ("demo", "smollm2") for batch in (1, 8, 32)),
), "What each method brings against its absence, with equal tokens. Memory: 600 requests through"
   " the real scheduler and block pool; lengths are lognormal, with the means that Kwon et al."
   " (arXiv 2309.06180) give for two data sets. Static batches: one engine, the next batch starts"
   " when the last request of a batch has ended; 16 requests, as many reservations of the longest"
   " request as fit the KV memory in which 64 requests run in blocks.",
   absent="it must be measured on a machine where nothing else runs")  # fmt: skip
_PREFIX, _LARGER, _TROUBLES = "prefix > seconds", "larger > seconds", "troubles > ratios > {}"
KV_FILES = Source("kv_files", (
    Row("first token of a prompt of 8,000 tokens, from files in the page cache / computed",
        ratio(f"{_PREFIX} > page cache", f"{_PREFIX} > computed", ".3f", " s"), "<= 0.35"),
    Row("first token of a prompt of 8,000 tokens, from files on the disk / computed",
        ratio(f"{_PREFIX} > disk", f"{_PREFIX} > computed", ".3f", " s"), "<= 0.35"),
    *(Row(f"likewise with Qwen3-0.6B's shape, from files {where} / computed",
          ratio(f"{_LARGER} > {place}", f"{_LARGER} > computed", ".3f", " s"), "<= 0.35")
      for place, where in (("page cache", "in the page cache"), ("disk", "on the disk"))),
    *(Row(f"a prompt of 8,000 tokens with files, {what} / without files",
          value(_TROUBLES.format(name), "{:.3f}"), "<= 1.05")
      for name, what in (("slow disk", "which a disk of 2 MB/s has"),
                         ("full disk", "on a full disk"),
                         ("read errors", "which cannot be read"))),
    Row("requests that find nothing, with files / without",
        value("nobody > ratio", "{:.3f}"), "<= 1.05"),
    Row("seconds until 10,000 files with 10 GiB are known",
        value("start > seconds", "{:.2f} s"), "<= 2"),
), "KV in files (`--kv-files`), SmolLM2-135M-Instruct, whose weights have 4 bits. Files are read by"
   " a new engine that has been idle for a moment. Requests that find nothing have prompts of 300"
   " tokens and 48 output tokens.",
   absent="it must be measured on a machine where nothing else runs")  # fmt: skip
SUBJECT = Subject(
    "Scheduler and engine",
    (
        Measurement("engine.scheduler", "engine/core", (SCHEDULER,)),
        Measurement("engine.engine_overhead", "engine/core engine/worker", (OVERHEAD,)),
        Measurement(
            "engine.host_overhead",
            "engine/worker kernels/baton_kernels/triton models/layers",
            (HOST,),
        ),
        Measurement(
            "engine.sampling_stability",
            "kernels/baton_kernels/reference.py engine/worker",
            (STABILITY,),
        ),
        Measurement(
            "engine.speculation", "engine/speculation engine/core/drafts.py", (SPECULATION,)
        ),
        Measurement("engine.kv_files", "engine/kv_files", (KV_FILES,)),
        Measurement(
            "engine.claims",
            "engine/core engine/worker/cuda_graphs.py models/cpu/decode_tapes.py",
            (CLAIMS,),
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
