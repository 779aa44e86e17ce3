"""Chaos drills of fetched prefixes: a load of conversations, and deaths of holders and readers.

The prompts of a conversation begin with the earlier prompts and their answers. The load sends the
turns in any order, while caches are flushed and nodes restart. So a node often lacks a beginning
that another node has, and fetches the beginning. A lost fetch costs only time: no request may fail,
wait long or get a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton import SamplingParams
from baton.deployment.local_deployment import LocalDeploymentConfig
from baton.processes.free_address import free_address
from benchmarks.faults.chaos_load import VOCABULARY, Asked, certain_answers
from benchmarks.runner.answers import Answer, Case
from benchmarks.runner.environment import DEMO_MODEL

# Arrow of a fetch's diagram -> process to kill, and the point at which it dies. Here, prefill nodes
# fetch from decode nodes. So a decode node sends what a prefill node sends in a hand-off, and only
# a fetch reaches these points.
FETCH_ARROWS = {
    4: [("d0", "Start:send"), ("p0", "Start:recv")],
    5: [("p0", "Grant:send"), ("d0", "Grant:recv")],
    6: [("d0", "Write:send")],
    8: [("d0", "Commit:send"), ("p0", "Commit:recv")],
    9: [("p0", "Cancel:send"), ("d0", "Cancel:recv")],
    10: [("d0", "Quiet:send"), ("p0", "Quiet:recv")],
}
# The same table for fetches between decode nodes, without prefill nodes: all messages belong to
# fetches.
DECODE_FETCH_ARROWS = {
    4: [("d0", "Start:send"), ("d0", "Start:recv")],
    5: [("d0", "Grant:send"), ("d0", "Grant:recv")],
    6: [("d0", "Write:send")],
    8: [("d0", "Commit:send"), ("d0", "Commit:recv")],
}
# Chunks are short, so that a prompt takes longer than its fetch although the model is tiny.
SHORT_CHUNK_TOKENS = 8
NODE_ARGS = [
    *("--dtype", "float32", "--num-blocks", "600", "--max-num-requests", "16"),
    *("--long-prefill-token-threshold", str(SHORT_CHUNK_TOKENS), "--fetch-prefixes"),
]
NUM_TURNS = 3


def make_conversations(num_conversations: int, seed: int) -> list[Case]:
    """Return the turns of greedy conversations, as cases whose answers are certain."""
    draw = random.Random(seed)
    cases: list[Case] = []
    so_far: list[list[int]] = [[] for _ in range(num_conversations)]
    params = [
        SamplingParams(max_tokens=draw.choice([2, 20, 40]), temperature=0.0, ignore_eos=True)
        for _ in range(num_conversations)
    ]
    for _ in range(NUM_TURNS):
        prompts = [[*one, *_words(draw)] for one in so_far]
        asked: list[Asked] = list(prompts)
        answers = certain_answers(
            str(DEMO_MODEL), asked, params, long_prefill_token_threshold=SHORT_CHUNK_TOKENS
        )
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if answer is not None:
                cases.append(Case(prompt, params[place], answer))
            so_far[place] = [*prompt, *(answer or ())]
    return cases


def fetch_config(kv_connector: str, *, by_decode_nodes: bool) -> LocalDeploymentConfig:
    """Return a deployment of nodes that fetch prefixes.

    Prefill nodes get prompts in turn, so that a prompt seldom reaches the node with its prefix.

    Args:
        by_decode_nodes: whether to use three decode nodes and no prefill node, instead of two nodes
            of each role.
    """
    if by_decode_nodes:
        return LocalDeploymentConfig(
            model=str(DEMO_MODEL),
            listen=free_address(),
            num_prefill=0,
            num_decode=3,
            router_args=["--policy", "cost"],
            node_args=[*NODE_ARGS, "--kv-connector", kv_connector],
        )
    return LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        num_prefill=2,
        num_decode=2,
        router_args=["--no-local-prefill", "--policy", "round_robin"],
        node_args=[*NODE_ARGS, "--kv-connector", kv_connector],
    )


def count_fetches(answers: Sequence[Answer]) -> dict[str, int]:
    """Count the fetches in the receipts: those received, and those lost."""
    receipts = [answer.receipt for answer in answers if answer.receipt is not None]
    parts = (part for receipt in receipts for part in (receipt.prefill, receipt.decode))
    computed = [part for part in parts if part is not None]
    return {
        "fetched": sum(one.num_fetched_tokens > 0 for one in computed),
        "fetches lost": sum(one.num_fetches_lost for one in computed),
    }


def _words(draw: random.Random) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(draw.choice([60, 120, 200]))]
