"""A split system gives each request the bits of one process that computes it alone, in any dtype.

Real nodes, protocol and router on a virtual clock: requests come in crowds, prompts are cut into
chunks, memory runs short, nodes die in the middle and what they had begun is computed elsewhere.
Tokens and logprobs are compared without a tolerance.

`make test` draws a few requests, `make company-long` many. Refuses to know: kernels.
"""

from __future__ import annotations

import functools
import random
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.worker.worker
from baton.api.errors import PoisonRequestError
from baton.api.outputs import Completion
from baton.api.sampling_params import SamplingParams
from baton.engine_config import PREEMPTION
from baton_kernels import dispatch
from decode_node.options import DecodeOptions
from engine import LLM
from kvconnector.peer_process import PeerProcess
from models import load_model
from prefill_node.options import PushMode
from router.policies import POLICIES
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, kv_of
from tests.fakes.system.checked_client import Client
from tests.fakes.system.split_cases import NUMBERS
from tests.fakes.system.system_setup import Setup
from tests.fakes.system.whole_system import NAMES, System
from tests.numerics.tiny_models import make_hugging_face_model, save
from tests.property.num_examples import num_requests

pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here"),
]

MORE_NUMBERS = ("float16", "bfloat16", "int4 weights", "fp8 weights")  # not in `make test`
# In keys, those of `kernels/csrc/attention.h`: texts end on both sides of their borders.
TILE, SPAN = 192, 576
LENGTHS = (3, 17, 40, 90, TILE - 3, TILE + 5, SPAN - 2, SPAN + 30)
MAX_MODEL_LEN = 640
NUM_BLOCKS = 250  # of a node: three long requests do not fit
MAX_TOKENS = 12
MAX_OPEN = 6  # requests at a time
LONG_S = 10_000.0


_kept: list[tempfile.TemporaryDirectory[str]] = []  # live as long as the process


@functools.cache
def folder() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="baton-test-")
    model = make_hugging_face_model(
        "Qwen3ForCausalLM",
        vocab_size=64,  # even: a wrong draft is a right one with its last bit turned
        # So many numbers that some lie where bfloat16 rounds another way if a sum's last bit moves.
        hidden_size=128,
        head_dim=32,
        num_hidden_layers=3,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    path = save(model, Path(kept.name))
    _kept.append(kept)
    return path


class Alone:
    """One process with memory to spare that computes requests one by one, prompts in one step."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        steps = {"max_num_batched_tokens": 1024, "long_prefill_token_threshold": 1024}
        self.llm = LLM(
            str(folder()),
            block_size=BLOCK_SIZE,
            num_blocks=2 * NUM_BLOCKS,
            prefix_cache=False,
            **steps,
            **options,
        )

    def complete(self, prompt: list[int], params: SamplingParams) -> Completion:
        return self.llm.generate([prompt], params)[0]

    def kv(self, prompt: list[int]) -> torch.Tensor:
        request = self.llm._make_choices(prompt, SamplingParams(max_tokens=5, ignore_eos=True))[0]
        self.llm.engine.add_request(request)
        while request.num_computed_tokens < len(prompt):
            self.llm.engine.step()
        kv = kv_of(self.llm.engine, request.block_ids, len(prompt))
        self.llm.engine.abort(request.request_id)
        return kv


class Crowd:
    """Requests that come to a system at random, and what happens to its nodes meanwhile."""

    def __init__(
        self,
        system: System,
        alone: Alone,
        seed: int,
        max_tokens: int = MAX_TOKENS,
        *,
        lengths: Sequence[int] = LENGTHS,
        priorities: Sequence[int] = (),
    ) -> None:
        self.system, self.alone = system, alone
        self.draw, self.max_tokens = random.Random(seed), max_tokens
        self.lengths, self.priorities = lengths, priorities
        self.asked: list[tuple[Client, Completion]] = []
        self.num_kills = 0
        self.struck: set[str] = set()  # requests that a node died under

    def check(self) -> int:
        """Compare all with what they are alone; returns how many two nodes died under."""
        num_refused = 0
        for client, expected in self.asked:
            client.check()
            num = len(client.token_ids)
            if isinstance(client.error, PoisonRequestError):
                assert self.num_kills
                num_refused += 1
            else:
                assert client.error is None
                assert num == len(expected.token_ids)
            assert tuple(client.token_ids) == expected.token_ids[:num]
            assert tuple(client.logprobs) == expected.logprobs[:num]
        return num_refused

    def call(self) -> None:
        longest = MAX_MODEL_LEN - self.max_tokens
        length = min(self.draw.choice(self.lengths) + self.draw.randrange(5), longest)
        # Prompts of a family begin alike: caches have a part of them.
        family = random.Random(self.draw.randrange(3))
        prompt = [family.randrange(3, 64) for _ in range(length)]
        params = SamplingParams(
            max_tokens=self.draw.randint(2, self.max_tokens),
            temperature=self.draw.choice([0.0, 2.0]),
            seed=self.draw.randrange(2**31),
            ignore_eos=True,
            logprobs=self.draw.choice([0, 2, 5]),
        )
        expected = self.alone.complete(prompt, params)
        assert expected.finish_reason is not None
        client = self.system.call(
            f"r{len(self.asked)}",
            prompt,
            params,
            LONG_S,
            (expected.token_ids, expected.finish_reason),
            priority=self.draw.choice(self.priorities) if self.priorities else 0,
        )
        self.asked.append((client, expected))

    @property
    def num_open(self) -> int:
        return sum(not client.is_done for client, _ in self.asked)

    def run(self, num_requests: int) -> None:
        while len(self.asked) < num_requests or self.num_open:
            if len(self.asked) < num_requests and self.num_open < MAX_OPEN:
                for _ in range(self.draw.randint(1, 3)):
                    self.call()
            for _ in range(self.draw.randint(1, 12)):
                self.system.flow(self.draw.choice([0.002, 0.05]), lands=self.draw.random() < 0.8)
            self._disturb()
        self.system.settle()

    def _disturb(self) -> None:
        """Kill a node that works on a request, or restart a killed node."""
        what = self.draw.random()
        is_whole = not any(process.dead for process in self.system.processes.values())
        if what < 0.3 and is_whole:
            self._kill()
        elif what > 0.7:
            self.system.heal(restart=True)

    def _kill(self) -> None:
        """None under which a request would die for the second time: such are refused."""
        held = {name: set[str]() for name in NAMES}
        for client, _ in self.asked:
            for name in self.system.states_of(client):
                held[name].add(client.call.request_id)
        names = [name for name in NAMES if held[name] and not held[name] & self.struck]
        if names:
            name = self.draw.choice(names)
            self.struck |= held[name]
            self.system.kill(name, quietly=False)
            self.num_kills += 1


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(secrets, "randbelow", lambda limit: limit // 2)
    # All of a test's nodes store their weights alike.
    monkeypatch.setattr(engine.worker.worker, "load_model", functools.cache(load_model))
    return monkeypatch


def make_system(alone: Alone, options: Mapping[str, Any], draw: random.Random) -> System:
    chunk = draw.choice([37, 100, 250])
    drafting = draw.choice(["drafts known before", "ngram", "none"])
    method = "ngram" if drafting == "ngram" else "none"
    return System(
        Setup(
            folder=folder(),
            expected_kv=alone.kv,
            num_blocks=NUM_BLOCKS,
            num_groups=1,
            async_scheduling=draw.random() < 0.5,
            push_mode=PushMode.LAYERS,
            kv_digests=False,
            options=DecodeOptions(local_prefill_threshold=0, max_step_stretch=0),
            preemption=draw.choice(PREEMPTION),
            policy=POLICIES.names()[0],
            router_is_busy=False,
            sometimes_alone=False,
            rounds_per_step=4,
            chunk_s=0.0,
            index_is_small=False,
            num_drafts=3 * (drafting == "drafts known before"),
            contents={},
            engine_options={
                "max_num_batched_tokens": 2 * chunk,
                "long_prefill_token_threshold": chunk,
                "speculative_method": method,
                "ngram_min": 1,
                **options,
            },
        )
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.thorough if kind in MORE_NUMBERS else ())
        for kind in NUMBERS
    ],
)
@pytest.mark.timeout(0)
def test_a_request_in_a_split_system_has_the_bits_it_has_alone(
    kind: str, patched: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    options = {"num_threads": 1, **NUMBERS[kind]}
    alone = Alone(options)
    draw = random.Random(kind)
    num_left = num_requests(240) // len(NUMBERS)
    num_kills = num_retried = num_refused = 0
    while num_left > 0:
        num_now = min(num_left, 25)
        num_left -= num_now
        system = make_system(alone, options, draw)
        patched.setattr(
            PeerProcess, "has_ended", lambda peer, dead=system.dead: peer.engine_id in dead
        )
        crowd = Crowd(system, alone, draw.randrange(2**31))
        try:
            crowd.run(num_now)
            system.close()
        finally:
            system.abandon()
        num_refused += crowd.check()
        num_kills += crowd.num_kills
        num_retried += sum(client.num_attempts > 1 for client, _ in crowd.asked)
    record_property("nodes killed", num_kills)
    record_property("requests retried", num_retried)
    record_property("requests refused", num_refused)
    assert num_kills > 0
    assert num_retried > 0, "no request was computed twice"
    assert num_refused * 50 <= num_requests(240), "hardly any dies twice"
