"""A fleet whose latencies are known: a router over HTTP, simulated nodes, a vocabulary of words.

Each token is a word of its own. So a text of so many words has as many tokens for whoever counts
them, the server or a client with its own tokenizer, and no token is without text.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from baton.processes.free_address import free_address
from benchmarks.runner.environment import ROOT

MODEL = ROOT / "examples" / "demo_model"
NAME = "words"  # under which it is served
_READY_TIMEOUT_S = 60.0
_SYLLABLES = [
    a + b for a, b in product("bdfgklmnprstvz", ("a", "e", "i", "o", "u"))
]  # 70: of two there are more than words


def write_model(folder: Path) -> list[str]:
    """Write the files that a router and simulated nodes read; return the vocabulary's words."""
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    words = ["".join(pair) for pair in product(_SYLLABLES, repeat=2)][: config["vocab_size"] - 1]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    vocabulary = {"<unk>": 0} | {f"▁{word}": number for number, word in enumerate(words, start=1)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    folder.mkdir()
    contents = {
        "config.json": config | {"eos_token_id": None, "pad_token_id": None},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return words


def fresh_texts(words: list[str], num_texts: int, num_words: int) -> Iterator[str]:
    """Return new texts of this many words each."""
    chance = random.SystemRandom()
    for _ in range(num_texts):
        yield " ".join(chance.choices(words, k=num_words))


def baton_environment() -> dict[str, str]:
    """Return an environment in which `python -m baton` is the one beside this file.

    Compiled modules are written, as an installation does. Otherwise each start compiles them all.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def baton(core: int, *words: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `baton` with these words, on one core."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "baton", *words],
            cwd=ROOT,
            env=baton_environment(),
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def fleet(model: Path, core: int, num_nodes: int, time_scale: float) -> Iterator[str]:
    """Run a router and ``num_nodes`` pairs of simulated nodes on one core; yield its HTTP URL.

    Raises:
        SystemExit: the router does not answer.
    """
    listen, http = free_address(), free_address()
    router = ("router", "--model", str(model), "--listen", listen, "--http-listen", http)
    name = ("--served-model-name", NAME)
    sim = ("sim-node", "--model", str(model), "--router", listen)
    nodes = ("--prefill", str(num_nodes), "--decode", str(num_nodes))
    children = [
        baton(core, *router, *name, log=model / "router.log"),
        baton(core, *sim, *nodes, "--time-scale", f"{time_scale:g}", log=model / "nodes.log"),
    ]
    try:
        url = f"http://{http}"
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not _answers(url):
            if time.monotonic() > deadline or any(child.poll() is not None for child in children):
                logs = "".join((model / f"{name}.log").read_text() for name in ("router", "nodes"))
                raise SystemExit(f"the simulated fleet does not answer:\n{logs[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        for child in reversed(children):
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait(30)


def _answers(url: str) -> bool:
    """Return whether the server completes a prompt."""
    body = json.dumps({"model": NAME, "prompt": [1, 2], "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
