"""Beam searches of clients give the tokens of `LLM.beam_search` and of `transformers`.

Real nodes, protocol and router on a virtual clock. `make test` draws a few searches, a large test
many, over three families. Refuses to know: HTTP, gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.worker.worker
from baton.api.beam_search import BeamCompletion, BeamSearchParams
from baton.api.outputs import TextDelta
from baton.api.sampling_params import SamplingParams
from decode_node.options import DecodeOptions
from engine import LLM
from kvconnector.peer_process import PeerProcess
from models import load_model
from prefill_node.options import PushMode
from router.calls.beam_run import BeamRun
from router.calls.call import Call, Terms
from router.policies import POLICIES
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE
from tests.fakes.system.system_setup import Setup
from tests.fakes.system.whole_system import System
from tests.numerics.tiny_models import make_hugging_face_model, save

VOCAB_SIZE = 61
MAX_MODEL_LEN = 128
OPTIONS = {"num_threads": 1, "dtype": "float32"}
FAMILIES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
LARGE = [pytest.param(one, 700, marks=pytest.mark.large) for one in FAMILIES]


class Searches:
    """A split system, the same model in one process, and in transformers."""

    def __init__(self, architecture: str, folder: Path, draw: random.Random) -> None:
        self.ends = sorted(draw.sample(range(VOCAB_SIZE), draw.choice([1, 3])))
        self.theirs: Any = make_hugging_face_model(
            architecture,
            max_position_embeddings=MAX_MODEL_LEN,
            initializer_range=0.3,
            vocab_size=VOCAB_SIZE,
            eos_token_id=self.ends,
        )
        path = save(self.theirs, folder)
        self.llm = LLM(str(path), block_size=BLOCK_SIZE, num_blocks=400, **OPTIONS)
        self.system = make_system(path)
        self.draw = draw
        self.asked: list[tuple[list[int], BeamSearchParams, asyncio.Task[list[TextDelta]]]] = []

    def ask(self) -> None:
        """Begin a drawn search in the split system."""
        draw = self.draw
        # (The embedding of token 0 is zero, so all tokens after it are equally probable.)
        prompt = [draw.randrange(1, VOCAB_SIZE) for _ in range(draw.choice([1, 5, 20, 47]))]
        beams = BeamSearchParams(
            beam_width=draw.choice([1, 2, 4, 7]),
            max_tokens=draw.randint(1, 12),
            length_penalty=draw.choice([1.0, 0.0, 2.0, -1.5]),
            early_stopping=draw.choice([False, True, "never"]),
            end_token_ids=frozenset(self.ends),
        )
        call = Call(
            request_id=f"r{len(self.asked)}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=12, temperature=0, logprobs=0),
            terms=Terms(received_at=time.perf_counter()),
            timeout_s=10_000.0,
        )
        room = MAX_MODEL_LEN - len(prompt)
        run = BeamRun(call, beams, room, self.system.dispatcher.run)

        async def read() -> list[TextDelta]:
            streams = [read_all(run, place) for place in range(beams.beam_width)]
            return [one for [one] in await asyncio.gather(*streams)]

        self.asked.append((prompt, beams, self.system.loop.create_task(read())))

    def run(self, num: int) -> None:
        while len(self.asked) < num or not all(task.done() for _, _, task in self.asked):
            while len(self.asked) < num and sum(not one[2].done() for one in self.asked) < 4:
                self.ask()
            self.system.flow(0.002)

    def check(self) -> None:
        for prompt, beams, task in self.asked:
            [alone] = self.llm.beam_search(
                [prompt],
                **{
                    field.name: getattr(beams, field.name)
                    for field in dataclasses.fields(beams)
                    if field.name != "end_token_ids"
                },
            )
            found = task.result()
            assert [one.token_ids for one in found] == [beam.token_ids for beam in alone]
            assert [one.finish_reason for one in found] == [beam.finish_reason for beam in alone]
            if beams.beam_width > 1:  # with one beam, transformers searches greedily
                assert [one.token_ids for one in found] == self.expected(prompt, beams, alone)

    def expected(
        self, prompt: list[int], beams: BeamSearchParams, alone: Sequence[BeamCompletion]
    ) -> list[tuple[int, ...]]:
        """Return the outputs of transformers, without padding."""
        width = beams.beam_width
        options = {"length_penalty": beams.length_penalty, "early_stopping": beams.early_stopping}
        rows = self.theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=beams.max_tokens,
            eos_token_id=self.ends,
            pad_token_id=0,
            **options,
        )
        padding = {0, *self.ends}  # what transformers writes behind an end token
        outputs = [row[len(prompt) :].tolist() for row in rows]
        ends = [len(beam.token_ids) for beam in alone]
        return [
            tuple(output[:end] if set(output[end:]) <= padding else output)
            for output, end in zip(outputs, ends, strict=True)
        ]


async def read_all(run: BeamRun, place: int) -> list[TextDelta]:
    return [one async for one in run.stream(place)]


def make_system(folder: Path) -> System:
    return System(
        Setup(
            folder=folder,
            expected_kv=lambda prompt: torch.empty(0),  # no KV is handed over
            num_blocks=120,
            num_groups=1,
            async_scheduling=False,
            push_mode=PushMode.LAYERS,
            kv_digests=False,
            options=DecodeOptions(local_prefill_threshold=0, max_step_stretch=0),
            preemption="hand-back",
            policy=POLICIES.names()[0],
            router_is_busy=False,
            sometimes_alone=False,
            rounds_per_step=4,
            chunk_s=0.0,
            index_is_small=False,
            num_drafts=0,
            contents={},
            engine_options={**OPTIONS, "max_num_requests": 16, "max_num_batched_tokens": 64},
        )
    )


@pytest.mark.parametrize(("architecture", "num"), [(FAMILIES[0], 20), *LARGE])
@pytest.mark.timeout(0)
def test_split_equals_one_process_equals_transformers(
    architecture: str, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda limit: limit // 2)
    monkeypatch.setattr(engine.worker.worker, "load_model", functools.cache(load_model))
    searches = Searches(architecture, tmp_path, random.Random(architecture))
    system = searches.system
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in system.dead)
    try:
        searches.run(num)
        system.settle()
        system.close()
    finally:
        system.abandon()
    searches.check()
