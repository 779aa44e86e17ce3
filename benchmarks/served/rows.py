"""Rows of docs/performance.md about serving over HTTP, other servers, and first requests."""

from __future__ import annotations

from benchmarks.page.measures import at, number, value
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject

_KINDS = {
    "chat": "chat, not streamed",
    "streaming": "chat",
    "completion": "completion",
    "short_prompt": "chat of 8 words",
    "long_prompt": "chat of 1,500 words",
    "sampled": "chat with filters and penalties",
    "two_answers": "chat with n = 2",
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "tools_auto": "tools, auto",
    "tools_required": "tools, required",
    "tools_named": "tools, one named",
    "logprobs": "logprobs",
    "responses": "Responses",
    "custom_tool": "Responses, custom tool with a grammar",
    "messages": "Messages",
}


def _first_use(kind: str, what: str) -> Row:
    def measure(document: Json) -> Found:
        texts, ratios = list[str](), list[float]()
        for shape in ("split", "colocated"):
            row = at(document, "shapes", shape, kind)
            ratios.append(number(row, "ratio"))
            first_ms, tenth_ms = (1e3 * number(row, name) for name in ("first_s", "tenth_s"))
            texts.append(f"{ratios[-1]:.2f} ({first_ms:.0f} / {tenth_ms:.0f} ms)")
        return Found("; ".join(texts), max(ratios))

    return Row(what, measure, "<= 1.3")


FIRST_USE = Source(
    "first_use",
    tuple(_first_use(kind, what) for kind, what in _KINDS.items()),
    "Time to the first byte of the first request after `baton up` says ready,"
    " divided by the median of the 8th to the 12th request of this kind: split; colocated."
    " Each kind has fresh systems. A prompt has 200 words where nothing else is said."
    " Each request has a new prompt, schema, tool or grammar.",
)
_SHAPES = {"125M": "125M, float32", "0.6B": "0.6B, bfloat16"}
_COLUMNS = {
    "output_tokens_per_s": "throughput",
    "ttft_p50_ms": "TTFT p50",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
}
_LARGER_IS_BETTER = {"output_tokens_per_s"}


def over_best_peer(servers: Json, shape: str, column: str) -> float:
    """Divide a Baton shape's median by the best peer's median; raises one of `NOT_THERE`."""
    of_peers = [
        number(row, column) for name, row in servers.items() if not name.startswith("baton")
    ]
    best = max(of_peers) if column in _LARGER_IS_BETTER else min(of_peers)
    return number(servers, shape, column) / best


def is_better(column: str, ratio: float) -> bool:
    """Return whether a ratio to a peer means that Baton is better."""
    return ratio > 1 if column in _LARGER_IS_BETTER else ratio < 1


def best_shape(servers: Json) -> str:
    """Return the shape of Baton that beats the peers in most columns; if several, the fastest."""

    def rank(shape: str) -> tuple[int, float]:
        gains = sum(is_better(key, over_best_peer(servers, shape, key)) for key in _COLUMNS)
        return gains, number(servers, shape, "output_tokens_per_s")

    shapes: list[str] = [name for name in servers if name.startswith("baton")]
    return max(shapes, key=rank)


def _beside_peers(shape: str, rate: str, column: str) -> Row:
    def measure(document: Json) -> Found:
        servers = at(document, "shapes", shape, "medians", rate)
        own = best_shape(servers)
        ratio = over_best_peer(servers, own, column)
        values = ", ".join(f"{name} {number(row, column):.4g}" for name, row in servers.items())
        failed = sum(number(row, "num_failed") for row in servers.values())
        told = f"; {failed:.0f} failed" if failed else ""
        return Found(f"{ratio:.2f} ({own}: {values}{told})", ratio)

    return Row(
        f"{_SHAPES[shape]}, {rate}/s: {_COLUMNS[column]}, best shape of Baton / best peer",
        measure,
        "> 1" if column in _LARGER_IS_BETTER else "< 1",
        "where no server is full, each completes all requests that arrive. There the colocated"
        " shape, the best one in most rows, decodes as fast as llama.cpp; split decodes faster.",
    )


def _of_colocated(shape: str, rate: str, column: str, target: str, holds_back: str = "") -> Row:
    def measure(document: Json) -> Found:
        servers = at(document, "shapes", shape, "medians", rate)
        split, both = (number(servers, f"baton {kind}", column) for kind in ("split", "colocated"))
        return Found(f"{split / both:.2f} ({split:.4g} / {both:.4g})", split / both)

    what = f"{_SHAPES[shape]}, {rate}/s: {_COLUMNS[column]}, split / colocated"
    return Row(what, measure, target, holds_back)


SERVED = Source("served", tuple(
    row
    for shape in _SHAPES
    for row in (
        *(_beside_peers(shape, rate, column) for rate in ("1", "4") for column in _COLUMNS),
        _of_colocated(shape, "4", "output_tokens_per_s", ">= 1",
                      "both nodes write a prompt's KV into memory that the system must provide"
                      " first, and few requests decode at a time; see the log."),
        _of_colocated(shape, "1", "itl_p99_ms", "<= 0.25"),
    )
), "`vllm bench serve`, 512 tokens in, 64 out, Poisson arrivals, against each server in turn"
   " on the same two cores, which the generator shares: medians of the rounds (output tokens/s,"
   " ms). The best shape of Baton is, at each rate, the one that beats the peers in most"
   " rows.")  # fmt: skip
_FILE = "files > SmolLM2-135M-Instruct.Q4_1"
_BOTH = ("baton colocated", "baton split")
_LOADS = {
    "1@128": "1 user, prompts of 128 tokens",
    "1@2048": "1 user, prompts of 2,048 tokens",
    "4@512": "4 users, prompts of 512 tokens",
    "16@512": "16 users, prompts of 512 tokens",
    "1/s@512": "1 request/s, prompts of 512 tokens",
    "chat": "chats of 8 turns",
}
_BESIDE = {
    "ttft_p50_ms": "TTFT p50",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "tokens_per_s": "tokens/s",
}


def _beside_best(load: str) -> Row:
    def measure(document: Json) -> Found:
        servers = at(document, _FILE, "ratios", load)
        texts, ratios = list[str](), list[float]()
        for column, what in _BESIDE.items():
            both = [number(servers, name, column) for name in _BOTH]
            ratios += both
            texts.append(f"{what} {both[0]:.2f}, {both[1]:.2f}")
        return Found("; ".join(texts), min(ratios))

    return Row(
        f"{_LOADS[load]}: times as good as the best peer",
        measure,
        "all >= 1",
        "one row's step of 4-bit weights takes longer than llama.cpp's on this CPU, and prompts are"
        " computed in the same steps as decodes, while llama.cpp lets prompts wait.",
    )


def _of_start(column: str, what: str, target: str) -> Row:
    def measure(document: Json) -> Found:
        starts = at(document, _FILE, "starts")
        peer = number(starts, "llamacpp", column)
        both = [number(starts, name, column) for name in _BOTH]
        text = ", ".join(f"{one / peer:.1f} ({one:.4g} / {peer:.4g})" for one in both)
        return Found(text, both[0] / peer)

    return Row(
        f"{what} / llama.cpp's",
        measure,
        f"{target} (one node)",
        "Python and torch: importing torch takes 130 MiB and about a second, and a router, nodes"
        " and workers are processes of their own.",
    )


def _turn(document: Json) -> Found:
    medians = at(document, _FILE, "medians > chat")
    one, other = (number(medians, name, "turn_4_ttft_p50_ms") for name in _BOTH)
    return Found(f"{other / one:.2f} ({other:.0f} / {one:.0f} ms)", other / one)


SERVED_ROWS = Source(
    "served_rows",
    (
        *(_beside_best(load) for load in _LOADS),
        Row("TTFT of turn 4: split / colocated", _turn, "<= 1.2"),
        _of_start("start_s", "seconds from the start to the first token", "<= 4"),
        _of_start("load_mib", "memory after the load, MiB", "<= 1.5"),
    ),
    "SmolLM2-135M from one GGUF file (Q4_1), 64 tokens out, in turns with llama.cpp's server on"
    " the same cores, which the client shares. Each pair of figures: colocated, split. A figure of"
    " 1 is as good as the best peer, a larger one better.",
)


def _answered(document: Json) -> Found:
    rows = at(document, "systems").values()
    return _all(["failed" not in row for row in rows])


def _equal_tokens(document: Json) -> Found:
    rows = at(document, "systems").values()
    emulated = [row for row in rows if row.get("machine") == "aarch64"]
    return _all([row.get("equals_this_machine") is True for row in emulated])


def _all(held: list[bool]) -> Found:
    if not held:
        raise ValueError("no system was measured")
    return Found(f"{sum(held)} of {len(held)}", all(held))


def _largest_wheel(document: Json) -> Found:
    largest = max(number(document, "wheels", name, "mb") for name in at(document, "wheels"))
    return Found(f"{largest:.1f}", largest)


def _of_system(what: str, tool: str, key: str) -> Row:
    return Row(what, value(f"systems > debian12-python3.11-{tool} > {key}", "{:,.5g}"))


FRESH_INSTALLS = Source(
    "fresh_installs",
    (
        Row("fresh systems that answer", _answered, "all"),
        Row("emulated aarch64 systems with the tokens of x86-64", _equal_tokens, "all"),
        Row("largest wheel, MB", _largest_wheel, "<= 25"),
        _of_system("installed with pip and PyTorch's CPU build, MB", "pip", "installed_mb"),
        _of_system("installed with pip and PyPI's torch, MB", "pypi", "installed_mb"),
        _of_system("memory of router and two nodes after an answer, MiB", "pip", "memory_mib"),
    ),
    "Baton's wheel in fresh Debian systems without a compiler, installed with the quickstart's"
    " commands. SmolLM2-135M answers; where QEMU emulates aarch64, the toy model. All rows are in"
    " [releases](releases.md#fresh-systems).",
    options="--torch-wheels FOLDER",
)


SUBJECT = Subject(
    "Served over HTTP",
    (
        Measurement("served.served", "engine router kernels/csrc", (SERVED,)),
        Measurement("served.first_use", "engine router baton/serving", (FIRST_USE,)),
        Measurement("served.served_rows", "engine router kernels/csrc", (SERVED_ROWS,)),
        Measurement("served.install_sizes", "pyproject.toml"),
        Measurement(
            "served.fresh_installs",
            "pyproject.toml tools/build_wheels.py kernels/csrc",
            (FRESH_INSTALLS,),
        ),
    ),
    log=(
        "2026-11-29: what a start takes, and threads that spin",
        "2026-11-26: served over HTTP beside vLLM",
        "2026-11-28: the first request of each kind",
    ),
)
