"""Chats over a real prefill and decode node: where each turn goes, what was expected, what it took.

Sessions chat at the same time with SmolLM2, through `baton up`'s processes and policy `cost`. Each
turn sends the whole conversation, as text, through the chat template. A shape is written as in
`baton loadtest compare`: "1:1+local" lets the decode node compute prompts, "colocated:2" has two
decode nodes and no prefill node. In a shape with "+fetch", nodes have the option --fetch-prefixes.
The shape "llamacpp" is llama.cpp's server on all cores, with the same file and the same chats.

With --scale, a turn has 1,000 input tokens and 400 output tokens, times the scale. The results of
this load are saved in a separate file, chat_load.json.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton import AsyncClient, SamplingParams
from baton.checkpoint.packaged_model import SMOLLM2
from benchmarks.router.chat_figures import FETCH, ratios, show, summarize, transpose
from benchmarks.router.chat_peer import PEER, measure_peer
from benchmarks.router.chat_turns import Chats, Load, Measured
from benchmarks.runner.deployments import deployed
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Document, Run
from examples.demo import fetch_model
from loadtest.load.shapes import Deployment

SHAPES = ("1:1+local", "colocated:1", "2:2", "2:2+fetch")
SCALED_SHAPES = ("2:2", "2:2+fetch", "2:2+local", "2:2+local+fetch", PEER)
BLOCK_TOKENS = 16
SCALED = "chat_load"  # name of the results with --scale
MOST_TOKENS = 8192  # positions of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Load):
    """Load of each run, and what is measured.

    Attributes:
        shapes: deployments, measured in turns.
        repeats: number of times that each shape is measured.
        lend: whether nodes lend idle cores, as with `baton up`; only for a machine without other
            work.
        scale: the tokens of a turn as a share of 1,000 input and 400 output tokens, in place of
            ``words`` and ``output_tokens``; 0: use these two.
    """

    shapes: Sequence[str] = ()
    repeats: int = 2
    lend: bool = False
    scale: float = 0.0

    def complete(self) -> Options:
        """Fill in what follows from other options.

        Raises:
            SystemExit: the model has too few positions for a whole chat.
        """
        whole = self
        if self.scale:
            words, output_tokens = round(1000 * self.scale), round(400 * self.scale)
            whole = dataclasses.replace(self, words=words, output_tokens=output_tokens)
        if whole.chat_tokens > MOST_TOKENS:
            raise SystemExit(
                f"turns: a chat must have at most {MOST_TOKENS} tokens, got {whole.chat_tokens}"
            )
        shapes = self.shapes or (SCALED_SHAPES if self.scale else SHAPES)
        return dataclasses.replace(whole, shapes=shapes)


def measure(gguf: str, shape: str, options: Options, seed: int) -> Measured:
    """Run all chats over a new deployment of this shape."""
    if shape == PEER:
        return measure_peer(Path(gguf), options, seed)
    wanted = Deployment.parse(shape.removesuffix(FETCH))
    local = () if wanted.is_local_allowed else ("--no-local-prefill",)
    # Each node has room for all chats, so that no figure depends on evictions.
    num_blocks = -(-options.sessions * options.chat_tokens // BLOCK_TOKENS)

    async def play(address: str, admin: Any) -> Measured:
        async with AsyncClient(address) as client:
            for word in ("warm", "up", "now"):
                await client.generate(word, SamplingParams(max_tokens=8))
            return await Chats(client, admin, options, seed).play()

    with (
        deployed(
            gguf,
            router_args=("--policy", "cost", *local),
            num_prefill=wanted.num_prefill,
            num_decode=wanted.num_decode,
            node_args=(
                *("--num-blocks", str(num_blocks)),
                *(("--fetch-prefixes",) if shape.endswith(FETCH) else ()),
            ),
            lend_cores=options.lend,
        ) as deployment,
        admin_of(deployment.config.listen) as admin,
    ):
        return asyncio.run(play(deployment.config.listen, admin))


def run(run: Run, options: Options) -> Document | None:
    """Measure the shapes in turns."""
    options = options.complete()
    gguf = fetch_model(run.console, SMOLLM2)
    if gguf is None:
        raise SystemExit("the model cannot be had")
    found: dict[str, list[Measured]] = {shape: [] for shape in options.shapes}
    for seed in range(options.repeats):
        for shape in options.shapes:
            measured = measure(gguf, shape, options, seed)
            show(run.console, shape, measured)
            found[shape].append(measured)
    results = {shape: summarize(runs, options.turns) for shape, runs in found.items()}
    document = {"load": asdict(options), "results": results, "ratios": ratios(results)}
    run.show("figure", transpose(results))
    run.show("ratio", transpose(document["ratios"]))
    if not options.scale:
        return document
    run.judge(document, SCALED)
    run.save(document, SCALED)
    return None
