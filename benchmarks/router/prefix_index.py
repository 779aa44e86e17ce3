"""Measure time and memory of the router's prefix index, with many nodes and blocks.

Every node holds blocks of its own, and blocks of a system prompt that all nodes have. Ten nodes
also hold blocks of long prompts: each of the ten holds a tenth of a prompt more than the node
before. Prompts take turns, so that the CPU's nearest cache holds none of them. Hashing is measured
separately, because a request is hashed only once. What the events cost a node's step is measured
with and without a router that receives them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

from baton.link.words import KVCacheEvents
from benchmarks.runner.environment import summary
from benchmarks.runner.run import Document, Run
from engine.core.block_pool import BlockPool
from node_runtime.reports.kv_event_feed import KVEventFeed
from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes

Hashes = tuple[int, ...]
KIND = HashKind(16, "xxh3_128")
NUM_PROMPT_TOKENS = 16_000
NUM_SHARING = 10
NUM_PROMPTS = 64
NUM_SYSTEM_BLOCKS = 64
EVENTS_PER_MESSAGE = 64


def microseconds(call: Callable[[], object], repetitions: int) -> dict[str, float]:
    samples = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return summary(samples, 1)


def fill(index: PrefixIndex, num_nodes: int, num_blocks: int, prompts: Sequence[Hashes]) -> float:
    """Give every node its blocks, in messages of usual size; return the events per second."""
    draw = random.Random(0)
    system = prompts[0][:NUM_SYSTEM_BLOCKS]
    seconds = 0.0
    num_events = 0
    for number in range(num_nodes):
        name = f"node-{number}"
        index.add_node(name, KIND)
        stored = [draw.getrandbits(64) for _ in range(num_blocks // num_nodes)]
        shared = list(system)
        if number < NUM_SHARING:
            for prompt in prompts:
                shared += prompt[: len(prompt) * (number + 1) // NUM_SHARING]
        index.apply_events(name, KVCacheEvents(1, True, tuple(shared)))
        sizes = range(0, len(stored), EVENTS_PER_MESSAGE)
        messages = [
            KVCacheEvents(2 + turn, False, tuple(stored[at : at + EVENTS_PER_MESSAGE]))
            for turn, at in enumerate(sizes)
        ]
        start = time.perf_counter()
        for message in messages:
            index.apply_events(name, message)
        seconds += time.perf_counter() - start
        num_events += len(stored)
    return num_events / seconds


def churn(index: PrefixIndex, num_rounds: int) -> float:
    """Return the events applied per second when each stored block evicts another block."""
    draw = random.Random(1)
    index.add_node("churn", KIND)
    old = tuple(draw.getrandbits(64) for _ in range(EVENTS_PER_MESSAGE))
    index.apply_events("churn", KVCacheEvents(1, True, old))
    messages = []
    for turn in range(num_rounds):
        new = tuple(draw.getrandbits(64) for _ in range(EVENTS_PER_MESSAGE))
        messages.append(KVCacheEvents(2 + turn, False, new, old))
        old = new
    start = time.perf_counter()
    for message in messages:
        index.apply_events("churn", message)
    return 2 * EVENTS_PER_MESSAGE * num_rounds / (time.perf_counter() - start)


def bytes_per_block(num_nodes: int, num_blocks: int) -> float:
    """Return the index's bytes per pair of a node and a block that it holds."""
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex()
    fill(index, num_nodes, num_blocks, [tuple(range(NUM_SYSTEM_BLOCKS))])
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / index.num_blocks


# ---------------------------------------------------------------------- the node's side


def step_overhead(repetitions: int) -> dict[str, dict[str, float]]:
    """Measure what events add to a step of 256 decodes, 16 of which fill and evict a block."""
    results = {}
    for name, listens, busy in (
        ("nobody listens", False, True),
        ("sent every 10 ms", True, True),
        ("sent every step", True, False),
    ):
        pool = BlockPool(1024)
        sent: list[KVCacheEvents] = []
        feed = KVEventFeed(pool, sent.append)
        if listens:
            feed.request_snapshot()
            feed.after_step(busy=busy)
        numbers = itertools.count()
        for _ in range(200):  # warm-up, in which every block is used once
            _decode_step(pool, feed, numbers, busy)
        call = functools.partial(_decode_step, pool, feed, numbers, busy)
        results[name] = microseconds(call, repetitions)
    return results


def _decode_step(pool: BlockPool, feed: KVEventFeed, numbers: Iterator[int], busy: bool) -> None:
    for _ in range(16):
        block_ids = pool.allocate(1)
        assert block_ids is not None
        pool.cache(block_ids, [next(numbers).to_bytes(16, "little")], b"parent")
        pool.release(block_ids)
    feed.after_step(busy=busy)


def measure_index(shape: dict[str, int], repetitions: int) -> dict[str, dict[str, float]]:
    """Measure the index; return the rows of the table by name."""
    draw = random.Random(2)
    token_ids = [draw.randrange(150_000) for _ in range(NUM_PROMPT_TOKENS)]
    system = PromptHashes(token_ids).of(KIND)[:NUM_SYSTEM_BLOCKS]
    num_own = NUM_PROMPT_TOKENS // KIND.block_size - NUM_SYSTEM_BLOCKS
    prompts = [
        system + tuple(draw.getrandbits(64) for _ in range(num_own)) for _ in range(NUM_PROMPTS)
    ]
    index = PrefixIndex()
    stored_per_s = fill(index, shape["num_nodes"], shape["num_blocks"], prompts)
    found = index.match(prompts[0])
    longest = [len(prompts[0]) * (number + 1) // NUM_SHARING for number in range(NUM_SHARING)]
    assert sorted(found.values())[-NUM_SHARING:] == longest
    turns = itertools.cycle(prompts)
    unknown = PromptHashes(token_ids[1:]).of(KIND)
    matches: dict[str, Callable[[], object]] = {
        "match 16,000 tokens: 10 nodes have much, all a little": lambda: index.match(next(turns)),
        "match 16,000 tokens: nobody has any": lambda: index.match(unknown),
        "hash 16,000 tokens, once per request": lambda: PromptHashes(token_ids).of(KIND),
    }
    results = {f"{name}, us": microseconds(call, repetitions) for name, call in matches.items()}
    results["stored, thousands/s"] = {"median": round(stored_per_s / 1e3)}
    results["stored and removed in turns, thousands/s"] = {
        "median": round(churn(index, 1000) / 1e3)
    }
    start = time.perf_counter()
    index.remove("node-0")
    results["remove a node, us"] = {"median": round((time.perf_counter() - start) * 1e6)}
    num_bytes = bytes_per_block(shape["num_nodes"], 2**18)
    results["memory per block of a node, bytes"] = {"median": round(num_bytes)}
    return results


def run(run: Run, nodes: int = 512, blocks: int = 2**21, repetitions: int = 200) -> Document:
    """Measure the index, and what its events add to a node's step.

    Args:
        blocks: number of blocks of all nodes together.
    """
    shape = {
        "num_nodes": nodes,
        "num_blocks": blocks,
        "num_prompt_tokens": NUM_PROMPT_TOKENS,
        "block_size": KIND.block_size,
        "events_per_message": EVENTS_PER_MESSAGE,
        "repetitions": repetitions,
    }
    results = measure_index(shape, repetitions)
    for name, value in step_overhead(repetitions * 10).items():
        results[f"a node's step that names 16 blocks, {name}, us"] = value
    run.show("us", results)
    return {"shape": shape, "results": results}
