"""Finds a model file, starts servers that serve it, and plays loads against them.

Refuses to know: which loads are compared, and what is reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from baton.checkpoint.model_folder import find_model_folder
from baton.checkpoint.packaged_model import SMOLLM2
from baton.processes.free_address import free_address
from baton.text.tokenizer import Tokenizer
from benchmarks.engine_cpu.engine_cpu import WORKS
from benchmarks.engine_cpu.perplexity import TEXTS
from benchmarks.served.process_costs import cost_of
from benchmarks.served.served_client import (
    Load,
    Numbers,
    Played,
    Player,
    Prompts,
    first_error,
    summarize,
)
from benchmarks.served.served_servers import NAME, SERVERS, Job, as_gguf, make_served, running
from examples.demo import fetch_model

ROOT = Path(__file__).resolve().parents[2]
# The load that is played before each load: ten requests, one after another.
WARM_UP = Load(prompt_tokens=128, output_tokens=8, num_streams=1, num_requests=10)
SPARE_TOKENS = 64  # additional tokens per slot, for the chat template and rounding


def tokens_of(load: Load) -> int:
    """Return the number of tokens of a request's prompt and output, or of a whole chat."""
    turns = max(1, load.turns)
    return turns * (load.prompt_tokens + load.output_tokens + SPARE_TOKENS)


@dataclass(frozen=True, slots=True)
class Model:
    """A model file to serve.

    Attributes:
        folder: folder in Hugging Face layout: configuration, tokenizer, and possibly weights.
        dtype: value of the option --dtype, for servers that have this option.
        has_chat: whether the file has a chat template.
    """

    name: str
    gguf: Path
    folder: Path
    dtype: str
    max_model_len: int
    has_chat: bool

    def lacks(self, load: Load) -> str:
        """Return why a load cannot be played with the model; "": it can."""
        if load.turns and not self.has_chat:
            return "the model has no chat template"
        fits = tokens_of(load) <= self.max_model_len
        return "" if fits else f"the context has {self.max_model_len} tokens"


def find_model(console: Console, word: str) -> Model:
    """Find a model file by its name or path; make it if necessary.

    Raises:
        SystemExit: SmolLM2 is not available.
        ModelLoadError: the file is no model.
        subprocess.CalledProcessError: converting a checkpoint to GGUF fails.
    """
    dtype = "auto"
    if word in WORKS:
        folder, dtype = make_served(word), WORKS[word].dtype
        gguf = as_gguf(Job(folder, dtype, "", ()))
    else:
        path = fetch_model(console, SMOLLM2) if word == "smollm2" else word
        if path is None:
            raise SystemExit("the model cannot be had")
        gguf = Path(path).resolve()
        folder = find_model_folder(str(gguf))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    length = config["max_position_embeddings"]
    has_chat = Tokenizer(folder).chat_template is not None
    return Model(gguf.stem, gguf, folder, dtype, length, has_chat)


class Bench:
    """Measures servers that serve one model file.

    Args:
        cores: all cores that a server may use.
        client_cores: all cores that this process uses.
    """

    def __init__(self, model: Model, cores: Sequence[int], client_cores: Sequence[int]) -> None:
        self.model = model
        self.tokenizer = Tokenizer(model.folder)
        text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
        self.token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self._cores = tuple(cores)
        os.sched_setaffinity(0, client_cores)

    def job(self, load: Load) -> Job:
        """Return the `Job` with which a server is started for a load."""
        job = Job(self.model.folder, self.model.dtype, free_address(), self._cores)
        return replace(
            job,
            gguf=self.model.gguf,
            max_model_len=self.model.max_model_len,
            num_slots=load.num_streams or job.num_slots,
            slot_tokens=tokens_of(load),
        )

    def play(self, url: str, load: Load, seed: int, seconds: float) -> Played:
        """Play a load against the server at ``url``, with prompts drawn by ``seed``."""
        prompts = Prompts(self.tokenizer, self.token_ids, seed)
        return asyncio.run(Player(url, NAME, load, prompts, seconds).play())

    def measure_once(
        self, name: str, load: Load, seed: int, seconds: float, reported_turn: int
    ) -> tuple[Numbers, Numbers, str]:
        """Start a server and play one load.

        Returns the load's figures, the start's figures, and the first error.

        Raises:
            RuntimeError: the server does not start, or fails during its first prompts.
            OSError: a program is missing.
            subprocess.SubprocessError: a server's environment cannot be made.
        """
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            log = Path(folder) / "server.log"
            with running(SERVERS[name], self.job(load), log) as live:
                begun = cost_of(live.pid)
                warm_up = self.play(live.url, WARM_UP, seed + 1, seconds)
                if error := first_error(warm_up, WARM_UP):
                    raise RuntimeError(f"its first prompts failed: {error}")
                played = self.play(live.url, load, seed, seconds)
                loaded = cost_of(live.pid)
        times = [1000 * (one.times[0] - one.sent_at) for one in warm_up.answers]
        start: Numbers = {
            "start_s": live.start_s,
            "start_cpu_s": begun.cpu_s,
            "start_mib": begun.pss_mib,
            "start_rss_mib": begun.rss_mib,
            "load_mib": loaded.pss_mib,
            "load_rss_mib": loaded.rss_mib,
            "first_ms": times[0],
            "first_over_tenth": times[0] / statistics.median(times[-3:]),
        }
        numbers = summarize(played, load, reported_turn)
        return (
            numbers,
            {key: round(value, 3) for key, value in start.items()},
            first_error(played, load),
        )
