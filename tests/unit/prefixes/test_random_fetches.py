"""Random walks over fetches: messages lost, doubled and late, writes damaged and failed, cancels.

Whatever happens: no token is wrong, no request waits for ever, and no block is lost.
"""

from __future__ import annotations

import random

import pytest

from tests.fakes.handoff.fetch_cluster import FetchCluster
from tests.unit.prefixes.test_fetched_prefixes import (
    FULL,
    NUM_OUT,
    PROMPT,
    STATES,
    WINDOWS,
    make,
    num_whole,
    tokens_of,
)

NUM_ACTIONS = 150


class Walk:
    """A cluster, and random actions on it."""

    def __init__(self, seed: int, architecture: str) -> None:
        self.draw, self.architecture = random.Random(seed), architecture
        self.cluster: FetchCluster = make(self.draw.choice([24, 60]), architecture=architecture)
        self.prompts = [[*PROMPT]]  # beginnings of conversations
        self.num_asked = 0

    def act(self) -> None:
        """Do one random thing."""
        draw, cluster, network = self.draw, self.cluster, self.cluster.network
        match draw.choice("aacgssssssssrrrrrrrrddddddddddddlllllltoxfmv"):
            case "a" if len([a for a in cluster.attempts.values() if a.is_open]) < 4:
                self.ask()
            case "c" if draw.random() < 0.2 and cluster.attempts:
                cluster.end(draw.choice(list(cluster.attempts)))
            case "s":
                cluster.step(draw.choice("pd"))
            case "r":
                cluster.round(draw.choice("pd"))
            case "d" if network.messages:
                cluster.network.deliver(draw.randrange(len(network.messages)))
            case "o" if network.messages:
                keep = draw.random() < 0.5  # else the order changes
                network.deliver(draw.randrange(len(network.messages)), keep=keep)
            case "x" if network.messages:
                network.drop(draw.randrange(len(network.messages)))
            case "l" if network.writes:
                network.land(draw.randrange(len(network.writes)))
            case "f" if network.writes and draw.random() < 0.3:
                network.fail(draw.randrange(len(network.writes)), landed=draw.random() < 0.5)
            case "m" if network.writes:
                network.land_damaged(draw.randrange(len(network.writes)), 0, 7, 1)
            case "t":
                cluster.clock.advance(1.2 if draw.random() < 0.05 else 0.05)
            case "g":
                cluster.run(0.25)
            case "v" if draw.random() < 0.3:
                draw.choice([cluster.p.engine, cluster.d.engine]).block_pool.reset_prefix_cache()

    def ask(self) -> None:
        """Continue a conversation, as its last complete turn says."""
        draw = self.draw
        prompt = list(draw.choice(self.prompts))
        if len(prompt) < 70 and draw.random() < 0.8:
            answer = tokens_of(tuple(prompt), NUM_OUT, self.architecture)
            prompt += [*answer, draw.randrange(5, 20), 7, 8]
            self.prompts.append(prompt)
        self.num_asked += 1
        num_fetched = num_whole(len(prompt) - draw.choice([1, 4, 8]))
        key, shares = (f"r{self.num_asked}", self.num_asked), draw.random() < 0.9
        max_tokens, alone = draw.choice([1, 5, NUM_OUT]), draw.random() < 0.4
        self.cluster.ask(key, prompt, max_tokens, num_fetched, shares=shares, alone=alone)

    def end(self) -> None:
        """Let everything come to rest, and check it."""
        cluster = self.cluster
        cluster.network.release()
        cluster.run(9.0)
        cluster.settle()
        for key, attempt in cluster.attempts.items():
            if attempt.is_complete:
                output = cluster.output(key)
                wanted = tokens_of(tuple(attempt.prompt), len(output), self.architecture)
                assert output == wanted, key
            assert not attempt.is_open, f"{key} waits for ever"
        cluster.assert_at_rest()


@pytest.mark.parametrize(
    ("seed", "architecture"), [(0, FULL), (1, FULL), (2, STATES), (3, WINDOWS)]
)
def test_nothing_is_wrong_hung_or_lost(seed: int, architecture: str) -> None:
    walk = Walk(seed, architecture)
    for _ in range(NUM_ACTIONS):
        walk.act()
    walk.end()
