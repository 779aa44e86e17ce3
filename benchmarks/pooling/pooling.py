"""Compare embeddings with sentence-transformers and llama.cpp's server: tokens/s, and equality.

The checkpoint has a Qwen3 shape, random weights, and a tokenizer that reads each word as one token.
Baton in one process is compared with sentence-transformers; a router with one prefill node is
compared with llama.cpp's server. All use the same cores. The texts of each round are new, so no
prefix is cached.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.processes.free_address import free_address
from benchmarks.engine_cpu.engine_cpu import WORKS, python_of, reason_of
from benchmarks.pooling.texts import BATCH, CASES, texts_of
from benchmarks.runner.own_process import answer_of, call_words, own_environment
from benchmarks.runner.run import Document, Run
from benchmarks.served.served_servers import (
    NAME,
    Job,
    Server,
    baton,
    llamacpp,
    make_served,
    running,
)

LIMIT_S = 900.0
AT_ONCE = 4  # number of requests that are sent to a server at the same time
Seconds = Mapping[str, Sequence[float]]  # case -> seconds of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How embeddings are timed.

    Attributes:
        shape: the checkpoint, 125M or 0.6B.
        rounds: number of rounds of each case; the best round counts.
        peers: other systems to time; their environments are installed if missing.
    """

    shape: Literal["125M", "0.6B"] = "125M"
    threads: int = 2
    rounds: int = 3
    peers: Sequence[Literal["sentence_transformers", "llamacpp"]] = ()


def make_embedder(shape: str) -> Path:
    """Make a copy of served.py's checkpoint, with the files that sentence-transformers needs."""
    source = make_served(shape)
    folder = source.with_name(f"{source.name}-embedder")
    if not (folder / "modules.json").exists():
        (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, folder)
        weights = folder / "model.safetensors"
        weights.unlink(missing_ok=True)
        weights.symlink_to((source / "model.safetensors").resolve())
        size = json.loads((folder / "config.json").read_text())["hidden_size"]
        pooling = {"word_embedding_dimension": size, "pooling_mode_lasttoken": True}
        pooling |= {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        (folder / "2_Normalize").mkdir(exist_ok=True)
        modules = [
            {"idx": index, "name": str(index), "path": place,
             "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, place) in enumerate(places.items())
        ]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


# ------------------------------------------------------------------ one process


def print_seconds(folder: str, dtype: str, threads: str, rounds: str, file: str) -> None:
    """Time Baton in this process; print seconds as JSON, write some embeddings to a file."""
    from engine import LLM

    llm = LLM(folder, dtype=dtype, num_threads=int(threads), kv_cache_bytes=2**30)
    seconds: dict[str, list[float]] = {}
    for case in CASES:
        llm.embed(texts_of(case, -1)[:BATCH])
        seconds[case] = []
        for number in range(int(rounds)):
            texts = texts_of(case, number)
            start = time.perf_counter()
            llm.embed(texts)
            seconds[case].append(time.perf_counter() - start)
    found = llm.embed(texts_of("64 tokens", 0)[:BATCH])
    Path(file).write_text(json.dumps([one.vector.tolist() for one in found]))
    print(json.dumps(seconds))


# ------------------------------------------------------------------ servers


def llamacpp_embedding(job: Job) -> list[str]:
    """Return the command of llama.cpp's server for embeddings of the last token."""
    sizes = [str(job.num_slots * job.slot_tokens)] * 2
    batches = ("--batch-size", sizes[0], "--ubatch-size", "2048")
    return [*llamacpp(job), "--embedding", "--pooling", "last", *batches]


SERVERS = {
    "baton": Server(baton("--prefill", "1", "--decode", "0"), lambda job: own_environment()),
    "llamacpp": Server(llamacpp_embedding, lambda job: dict(os.environ)),
}


def embed_by(url: str, texts: Sequence[str]) -> list[list[float]]:
    """Return the embeddings of texts, requested as the `openai` client requests them."""
    body = {"model": NAME, "input": texts, "encoding_format": "base64"}
    request = urllib.request.Request(
        f"{url}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.loads(answer.read())["data"]
    return [array("f", base64.b64decode(one["embedding"])).tolist() for one in found]


def answers_embeddings(url: str) -> bool:
    """Return whether a server answers a request for the embedding of a word."""
    try:
        return len(embed_by(url, [" a"])) == 1
    except OSError:
        return False


def seconds_of_server(name: str, job: Job, rounds: int) -> Seconds:
    """Start a server, send each round's texts, `BATCH` per request; return the seconds."""
    seconds: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running(SERVERS[name], job, Path(folder) / "log", answers_embeddings) as live,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for case in CASES:
            embed_by(live.url, texts_of(case, -1)[:BATCH])
            seconds[case] = []
            for number in range(rounds):
                texts = texts_of(case, number)
                size = min(BATCH, len(texts) // AT_ONCE)
                parts = [texts[at : at + size] for at in range(0, len(texts), size)]
                start = time.perf_counter()
                list(pool.map(lambda part: embed_by(live.url, part), parts))
                seconds[case].append(time.perf_counter() - start)
    return seconds


# ------------------------------------------------------------------ the comparison


def run(run: Run, options: Options) -> Document:
    """Time all systems, one after another."""
    work, folder = WORKS[options.shape], make_embedder(options.shape)
    job = Job(folder, work.dtype, free_address(), tuple(range(options.threads)), num_slots=8)
    environment = own_environment(OMP_NUM_THREADS=str(options.threads))
    missing: dict[str, str] = {}
    found: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        files = {one: Path(name) / one for one in ("baton", "sentence_transformers")}
        numbers = (work.dtype, options.threads, options.rounds)
        call = call_words("benchmarks.pooling.pooling:print_seconds", folder, *numbers)
        found["baton, one process"] = answer_of([*call, files["baton"]], LIMIT_S, env=environment)
        found["baton, router and prefill node"] = seconds_of_server("baton", job, options.rounds)

        def time_peer(peer: str, name: str, measure: Callable[[], Seconds]) -> None:
            if peer not in options.peers:
                return
            try:
                found[name] = measure()
            except (subprocess.SubprocessError, OSError, ValueError, RuntimeError) as error:
                missing[name] = reason_of(error)
                print(name, missing[name], file=sys.stderr)

        def time_theirs() -> Seconds:
            script = Path(__file__).parent / "sentence_transformers_side.py"
            python = python_of("sentence_transformers")
            words = [python, script, folder, *numbers, files["sentence_transformers"]]
            seconds: Seconds = answer_of(words, LIMIT_S, env=environment)
            return seconds

        time_peer("sentence_transformers", "sentence-transformers", time_theirs)
        time_peer(
            "llamacpp",
            "llama.cpp's server",
            lambda: seconds_of_server("llamacpp", job, options.rounds),
        )
        difference = _difference(files)
    rates = {name: _rates(seconds) for name, seconds in found.items()}
    run.show("tokens per second", rates)
    return {
        "shape": work.shape,
        "dtype": work.dtype,
        "num_threads": options.threads,
        "tokens_per_second": rates,
        "over_peers": _over_peers(rates),
        "most_difference": difference,
        "missing": missing,
    }


def _rates(seconds: Seconds) -> dict[str, float]:
    """Return the tokens per second of the best round, by case."""
    sizes = {case: num_texts * length for case, (num_texts, length) in CASES.items()}
    return {case: round(sizes[case] / min(times), 1) for case, times in seconds.items()}


def _over_peers(rates: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return Baton's rates divided by the compared peer's rates, by case."""
    pairs = {
        "sentence-transformers": "baton, one process",
        "llama.cpp's server": "baton, router and prefill node",
    }
    return {
        peer: {case: round(rates[ours][case] / rates[peer][case], 2) for case in CASES}
        for peer, ours in pairs.items()
        if peer in rates
    }


def _difference(files: Mapping[str, Path]) -> float | None:
    """Return the largest difference between two files' embeddings; None: a file is missing."""
    if not all(file.exists() for file in files.values()):
        return None
    ours, theirs = (json.loads(file.read_text()) for file in files.values())
    found: float = max(
        abs(mine - other)
        for one, another in zip(ours, theirs, strict=True)
        for mine, other in zip(one, another, strict=True)
    )
    return found
