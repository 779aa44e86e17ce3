"""Beam searches over prompts with images give the outputs of transformers, also if split."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from baton.api.beam_search import BeamSearchParams
from baton.api.errors import InvalidRequestError
from baton.api.outputs import TextDelta
from baton.api.sampling_params import SamplingParams
from engine import LLM
from kvconnector.peer_process import PeerProcess
from models.vision.preprocess import Preprocessor
from router.calls.beam_run import BeamRun
from router.calls.call import Call, Terms
from tests.fakes.images.inline_pixels import decode_inline
from tests.fakes.system.whole_system import System
from tests.numerics.test_images_equal_transformers import (
    QUICK,
    Parts,
    draw_parts,
    image,
    load,
    prompt_of,
)
from tests.numerics.vision_checkpoints import VisionCheckpoint, file_of, make_vision_checkpoint
from tests.property.test_beams_in_a_split_system import make_system, read_all

WIDTH, NUM_TOKENS = 3, 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    return make_vision_checkpoint(QUICK, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint: VisionCheckpoint) -> LLM:
    return load(checkpoint)


@torch.inference_mode()
def expected(checkpoint: VisionCheckpoint, parts: Parts, ends: Sequence[int]) -> list[list[int]]:
    """Return the outputs of transformers, best first."""
    texts = (part if isinstance(part, str) else checkpoint.expanded_text(part) for part in parts)
    ids = checkpoint.tokenizer("".join(texts), add_special_tokens=False).input_ids
    result = checkpoint.theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=list(ends),
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **checkpoint.model_inputs(*(part for part in parts if not isinstance(part, str))),
    )
    lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
    return [
        row[len(ids) : len(ids) + length].tolist()
        for row, length in zip(result.sequences, lengths, strict=True)
    ]


def test_beams_of_one_process_are_those_of_transformers(
    checkpoint: VisionCheckpoint, llm: LLM
) -> None:
    ends = sorted(llm.engine.eos_token_ids)
    prompts: list[Parts] = [["ab", image(0), "cd"], draw_parts(checkpoint, 5, 2), ["ab", image(2)]]
    asked = [prompt_of(checkpoint, parts) for parts in prompts]
    found = llm.beam_search(asked, beam_width=WIDTH, max_tokens=NUM_TOKENS)
    wanted = [expected(checkpoint, parts, ends) for parts in prompts]
    assert [[list(beam.token_ids) for beam in beams] for beams in found] == wanted
    metrics = llm.metrics()
    assert metrics.images_encoded_total == 4, "beams share the blocks of the prompt"
    assert metrics.cached_prompt_tokens_total > 0


def test_an_image_that_cannot_be_decoded_ends_the_search(
    checkpoint: VisionCheckpoint, llm: LLM
) -> None:
    broken: Any = {"prompt": checkpoint.marker, "images": [file_of(image(0))[:200]]}
    with pytest.raises(InvalidRequestError, match=r"^images\[0\]: the file cannot be decoded$"):
        llm.beam_search([broken], beam_width=2, max_tokens=2)
    assert not llm.engine.requests


@pytest.fixture
def system(checkpoint: VisionCheckpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    system = make_system(checkpoint.folder)
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in system.dead)
    yield system
    system.settle()
    system.close()
    system.abandon()


def test_beams_of_a_split_system_are_those_of_one_process(
    checkpoint: VisionCheckpoint, llm: LLM, system: System
) -> None:
    for process in system.processes.values():
        decode_inline(process.node.engine, Preprocessor(checkpoint.folder))
    read = llm._maker.read(prompt_of(checkpoint, ["ab", image(0), "cd"]))
    [wanted] = llm.beam_search(
        [prompt_of(checkpoint, ["ab", image(0), "cd"])], beam_width=WIDTH, max_tokens=NUM_TOKENS
    )
    beams = BeamSearchParams(
        beam_width=WIDTH, max_tokens=NUM_TOKENS, end_token_ids=llm.engine.eos_token_ids
    )
    call = Call(
        request_id="r",
        prompt_token_ids=read.token_ids,
        sampling_params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0),
        terms=Terms(received_at=time.perf_counter()),
        timeout_s=10_000.0,
        images=read.images,
    )
    run = BeamRun(call, beams, 1000, system.dispatcher.run)

    async def read_outputs() -> list[TextDelta]:
        streams = [read_all(run, place) for place in range(WIDTH)]
        return [one for [one] in await asyncio.gather(*streams)]

    task = system.loop.create_task(read_outputs())
    while not task.done():
        system.flow(0.002)
    assert [one.token_ids for one in task.result()] == [beam.token_ids for beam in wanted]
    metrics = {name: one.node.engine.metrics() for name, one in system.processes.items()}
    encoded = {name: one.images_encoded_total for name, one in metrics.items()}
    assert max(encoded.values()) == 1, "beams share the blocks of the prompt"
    assert encoded["d0"] == encoded["d1"] == 0
