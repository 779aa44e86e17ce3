"""Priorities change no token: drawn requests, in one process and split, with short memory.

`make test` draws some hundreds of requests, a large test two thousand. Refuses to know: who is
served first (`unit/engine/test_priority.py`).
"""

from __future__ import annotations

import functools
import random
import secrets

import pytest

import engine.worker.worker
from baton.api.sampling_params import SamplingParams
from engine import LLM
from kvconnector.peer_process import PeerProcess
from models import load_model
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE
from tests.property.test_split_in_any_company import (
    Alone,
    Crowd,
    folder,
    make_system,
)

OPTIONS = {"num_threads": 1, "dtype": "float32"}
BY_PRIORITY = {**OPTIONS, "scheduling_policy": "priority", "num_blocks": 60}
LENGTHS = (3, 17, 40, 90)
PRIORITIES = (-7, -1, 0, 0, 0, 3, 2**31 - 1)
MANY = pytest.param(2000, marks=pytest.mark.large, id="2000")


class PriorityCrowd(Crowd):
    """A crowd that also checks that nodes know the priorities of their requests."""

    num_seen = 0

    def _disturb(self) -> None:
        asked = {client.call.request_id: client.call.terms.priority for client, _ in self.asked}
        for process in self.system.processes.values():
            for request in [] if process.dead else process.node.engine.requests.values():
                assert request.priority == asked[request.request_id.rpartition("~")[0]]
                self.num_seen += 1
        super()._disturb()


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(OPTIONS)


@pytest.mark.parametrize("num", [200, MANY])
@pytest.mark.timeout(0)
def test_one_process_gives_the_tokens_it_gives_alone(num: int, alone: Alone) -> None:
    draw = random.Random(num)
    llm = LLM(str(folder()), block_size=BLOCK_SIZE, max_num_requests=8, **BY_PRIORITY)
    prompts = [[draw.randrange(3, 64) for _ in range(draw.choice(LENGTHS))] for _ in range(num)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 12),
            temperature=draw.choice([0.0, 2.0]),
            seed=draw.randrange(2**31),
            ignore_eos=True,
        )
        for _ in range(num)
    ]
    priorities = [draw.choice(PRIORITIES) for _ in range(num)]
    together = llm.generate(prompts, params, priority=priorities)
    expected = alone.llm.generate(prompts, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in expected]
    counters = llm.engine.metrics()
    assert counters.preemptions_total > 0
    assert counters.requests_started_by_priority == {
        "negative": sum(priority < 0 for priority in priorities),
        "zero": priorities.count(0),
        "positive": sum(priority > 0 for priority in priorities),
    }
    assert sum(counters.preemptions_by_priority.values()) == counters.preemptions_total


@pytest.mark.parametrize("num", [50, MANY])
@pytest.mark.timeout(0)
def test_a_split_system_gives_the_tokens_of_one_process(
    num: int, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda limit: limit // 2)
    monkeypatch.setattr(engine.worker.worker, "load_model", functools.cache(load_model))
    draw = random.Random(num)
    num_seen = num_left = 0
    for num_left in range(num, 0, -50):
        system = make_system(alone, BY_PRIORITY, draw)
        monkeypatch.setattr(
            PeerProcess, "has_ended", lambda peer, dead=system.dead: peer.engine_id in dead
        )
        seed = draw.randrange(2**31)
        crowd = PriorityCrowd(system, alone, seed, lengths=LENGTHS, priorities=PRIORITIES)
        try:
            crowd.run(min(num_left, 50))
            system.close()
        finally:
            system.abandon()
        crowd.check()
        num_seen += crowd.num_seen
    assert num_seen > num
