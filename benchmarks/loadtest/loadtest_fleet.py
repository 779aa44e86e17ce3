"""Runs a fleet with known latencies: a router with HTTP, and simulated nodes.

Each token of the served model is a word. So a text has as many tokens as words, both by the
server's count and by any client's tokenizer, and no token is without text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from baton.processes.free_address import free_address
from benchmarks.runner.checkpoints import ids_of, tokenizer_document
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import SimFleet

NAME = "words"  # the served model's name
_SYLLABLES = [
    a + b for a, b in product("bdfgklmnprstvz", ("a", "e", "i", "o", "u"))
]  # 70 syllables; a word is two of them


def write_model(folder: Path) -> list[str]:
    """Write the model files that a router and simulated nodes read; return all words."""
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    words = ["".join(pair) for pair in product(_SYLLABLES, repeat=2)][: config["vocab_size"] - 1]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    vocabulary = ids_of(["<unk>", *(f"▁{word}" for word in words)])
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    tokenizer = tokenizer_document(model, pre_tokenizer=space, decoder=space)
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
    """Yield ``num_texts`` new texts of ``num_words`` words each."""
    chance = random.SystemRandom()
    for _ in range(num_texts):
        yield " ".join(chance.choices(words, k=num_words))


@contextmanager
def fleet(model: Path, core: int, num_nodes: int, time_scale: float) -> Iterator[str]:
    """Run a router and ``num_nodes`` pairs of simulated nodes on one core; yield the HTTP URL.

    Raises:
        TimeoutError: the nodes do not join in time.
    """
    http = free_address()
    words = ("--http-listen", http, "--served-model-name", NAME)
    scale = ("--time-scale", time_scale)
    with SimFleet(num_nodes, num_nodes, *scale, model=model, router_words=words, core=core) as sim:
        sim.wait_ready()
        yield f"http://{http}"
