"""The first screen of docs/performance.md: ten questions of users, each with an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.page.measures import at, number
from benchmarks.page.rows import Json


@dataclass(frozen=True, slots=True)
class Headline:
    """A question, and how to find its answer in a file of results.

    Attributes:
        source: name of the file: `benchmarks/results/<source>.json`.
        answer: returns the answer's text, given the file; raises one of `NOT_THERE`.
    """

    question: str
    source: str
    answer: Callable[[Json], str]


def _over_peer(case: str, pair: str, ours: str) -> Callable[[Json], str]:
    def answer(document: Json) -> str:
        ratio = number(document, "ratio_to_best_peer", pair, case)
        rate = number(document, "tokens_per_second", ours, case)
        return f"{ratio:.2f} times the best peer's rate ({rate:,.0f} tokens/s)"

    return answer


def _served(column: str, unit: str) -> Callable[[Json], str]:
    def answer(document: Json) -> str:
        servers = at(document, "shapes", "125M", "medians", "4")
        peers = {who: number(row, column) for who, row in servers.items() if "baton" not in who}
        own = {who: number(row, column) for who, row in servers.items() if "baton" in who}
        choose = max if unit == "tokens/s" else min
        name, peer = (
            choose(own, key=lambda who: own[who]),
            choose(peers, key=lambda who: peers[who]),
        )
        text = f"{own[name] / peers[peer]:.2f} times that of the best peer, {peer}"
        return f"{text} ({own[name]:,.0f} / {peers[peer]:,.0f} {unit}; {name})"

    return answer


def _exposed(document: Json) -> str:
    late, hidden = (
        number(document, "push", "modes", "16384 tokens", mode, "exposed_transfer_ms")
        for mode in ("after-prefill", "layers")
    )
    return f"{hidden:.2f} ms; {late:.0f} ms where KV is sent after the prefill"


def _drills(document: Json) -> str:
    drills = at(document, "drills").values()
    broken = sum(bool(at(drill, "broken")) for drill in drills)
    return f"{len(drills) - broken} of {len(drills)} drills lose nothing"


def _split(document: Json) -> str:
    ratios = at(document, "verdict", "ratios")
    itl, goodput = number(ratios, "itl_p99_s"), number(ratios, "goodput_per_s")
    text = f"{itl:.2f} of the ITL p99, {goodput:.2f} times the goodput"
    return text if "format" in document else f"{text} by the old definition"


def _divergence(document: Json) -> str:
    ratios = [number(one, "kl_ratio") for one in at(document, "files").values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f} of llama.cpp's KL, {len(ratios)} files"


def _accuracy(document: Json) -> str:
    tasks = at(document, "tasks").values()
    otherwise = sum(int(number(task, "num_judged_otherwise")) for task in tasks)
    num_items = sum(int(number(task, "num_items")) for task in tasks)
    return f"{otherwise} of {num_items} answers judged otherwise than `transformers`'"


def _gpu_step(document: Json) -> str:
    found = number(document, "parts", "decode", "8B, batch 1: floor / measured")
    return f"{found:.2f} of what reading weights and KV allows"


_CPU = "engine_cpu_0.6b_x86-64-v4-amx"
HEADLINES = (
    Headline("Throughput served over HTTP, 125M weights, 4 requests/s", "served",
             _served("output_tokens_per_s", "tokens/s")),
    Headline("Gap between tokens (ITL p50) at this load", "served", _served("itl_p50_ms", "ms")),
    Headline("One request's decode on two cores, 0.6B, bfloat16", _CPU,
             _over_peer("decode 1", "bf16", "baton bf16")),
    Headline("Prefill of 2,048 tokens on two cores, 0.6B, bfloat16", _CPU,
             _over_peer("prefill 2048", "bf16", "baton bf16")),
    Headline("KV still to send when a prompt of 16,384 tokens is computed", "handoff", _exposed),
    Headline("Real nodes killed or stopped under load", "chaos", _drills),
    Headline("Split compared with colocated, long prompts, two cores", "compare", _split),
    Headline("Rounding error with GGUF files of 4 to 8 bits", "divergence", _divergence),
    Headline("Accuracy by lm-eval, split over two nodes", "lm_eval_agreement", _accuracy),
    Headline("A decode step of 8B on an H200", "gpu_suite", _gpu_step),
)  # fmt: skip
