"""Checks the client of served_rows.py against guidellm, with two loads on one server.

The two programs take turns, and send texts of equal length at equal times; the medians of the
rounds are compared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.loadtest import loadtest_agreement
from benchmarks.loadtest.loadtest_agreement import GENERATORS, play
from benchmarks.served.served_bench import Bench
from benchmarks.served.served_client import Load, Numbers, Played, Prompts, first_error, summarize
from benchmarks.served.served_servers import SERVERS, running
from tests.clients.environments import interpreter

SERVER = "baton colocated"
LOADS = {
    "4@512": Load(
        prompt_tokens=512, output_tokens=64, num_streams=4, num_requests=24, as_text=True
    ),
    "1/s@512": Load(
        prompt_tokens=512, output_tokens=64, rate=1.0, num_requests=24, even=True, as_text=True
    ),
}
# Our name -> guidellm's name in loadtest_agreement.py.
COMPARED = {
    "ttft_mean_ms": "ttft_mean_ms",
    "ttft_p50_ms": "ttft_p50_ms",
    "tpot_mean_ms": "itl_mean_ms",
    "tpot_p50_ms": "itl_p50_ms",
    "tokens_per_s": "output_tokens_per_s",
}
WITHIN = 0.05
ROUNDS = 5


def check(bench: Bench, console: Console) -> bool:
    """Run both programs, and print their figures; return whether all figures agree.

    Raises:
        subprocess.CalledProcessError: guidellm cannot be installed.
        RuntimeError: the server does not start, or a request fails.
    """
    interpreter("guidellm")  # install guidellm before a server uses the cores
    agree = True
    for name, load in LOADS.items():
        ours, theirs = list[Numbers](), list[Numbers]()
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            log = Path(folder) / "server.log"
            with running(SERVERS[SERVER], bench.job(load), log) as live:
                bench.play(live.url, replace(load, num_requests=4), 1, 0)
                for number in range(ROUNDS):
                    ours.append(_ours(bench, live.url, load, 10 + 2 * number))
                    theirs.append(_guidellm(bench, live.url, load, 11 + 2 * number))
        found = compare(ours, theirs)
        table = Table("", "this client", "guidellm", "apart", title=f"{name}, {SERVER}", box=None)
        for key, (own, other, apart) in found.items():
            table.add_row(key, f"{own:.4g}", f"{other:.4g}", f"{apart:.1%}")
            agree = agree and apart <= WITHIN
        console.print(table)
    word = "holds" if agree else "MISSED"
    console.print(f"{word}: this client and guidellm agree within {WITHIN:.0%}")
    return agree


def compare(
    ours: Sequence[Numbers], theirs: Sequence[Numbers]
) -> Mapping[str, tuple[float, float, float]]:
    """Return both programs' medians, and by how much the larger exceeds the smaller."""
    found = {}
    for key, other_key in COMPARED.items():
        own = statistics.median(one[key] for one in ours)
        other = statistics.median(one[other_key] for one in theirs)
        found[key] = own, other, max(own, other) / min(own, other) - 1
    return found


def over_all(played: Played) -> float:
    """Return output tokens per second from the first request to the last piece of text."""
    last = max(one.times[-1] for one in played.answers)
    return sum(one.num_tokens for one in played.answers) / (last - played.began_at)


def _ours(bench: Bench, url: str, load: Load, seed: int) -> Numbers:
    played = bench.play(url, load, seed, 0)
    if error := first_error(played, load):
        raise RuntimeError(error)
    return summarize(played, load, 0) | {"tokens_per_s": over_all(played)}


def _guidellm(bench: Bench, url: str, load: Load, seed: int) -> Numbers:
    generator = GENERATORS["guidellm"]
    prompts = Prompts(bench.tokenizer, bench.token_ids, seed)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        rhythm = loadtest_agreement.Load(
            load.num_requests, rate=load.rate or None, concurrency=load.num_streams or None
        )
        job = loadtest_agreement.Job(rhythm, url, bench.model.folder, Path(name))
        texts = (prompts.draw_text(load.prompt_tokens) for _ in range(load.num_requests))
        lines = (json.dumps(generator.entry(text, load.output_tokens)) + "\n" for text in texts)
        job.prompts.write_text("".join(lines), encoding="utf-8")
        said = play(generator, job)
        try:
            numbers = generator.numbers(job.folder)
        except (OSError, LookupError, ValueError) as error:
            raise RuntimeError(f"{error!r}: {said}") from error
    if numbers["num_ok"] != load.num_requests:
        raise RuntimeError(f"not all requests ended well: {said}")
    return numbers
