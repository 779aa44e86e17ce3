"""Prompts with images over a prefill and a decode node: one process's tokens, encoded once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.api.images import PromptImage
from baton.api.sampling_params import SamplingParams
from decode_node.options import DecodeOptions
from engine import LLM
from engine.core.request import Request
from engine.offline.images import with_images
from models.vision.preprocess import Preprocessor
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, Cluster, kv_of
from tests.fakes.images.inline_pixels import decode_inline
from tests.numerics.test_images_equal_transformers import QUICK, draw_parts, prompt_of
from tests.numerics.vision_checkpoints import VisionCheckpoint, make_vision_checkpoint

NUM_BLOCKS, NUM_TOKENS = 400, 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)

Expanded = tuple[list[int], tuple[PromptImage, ...]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    return make_vision_checkpoint(QUICK, tmp_path_factory.mktemp("model"))


@functools.cache
def preprocessor(folder: Path) -> Preprocessor:
    return Preprocessor(folder)


@pytest.fixture(scope="module")
def llm(checkpoint: VisionCheckpoint) -> LLM:
    llm = LLM(
        str(checkpoint.folder),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=4 * NUM_BLOCKS,
        prefix_cache=False,
        num_threads=1,
    )
    decode_inline(llm.engine, preprocessor(checkpoint.folder))
    return llm


@pytest.fixture(scope="module")
def prompts(checkpoint: VisionCheckpoint, llm: LLM) -> list[Expanded]:
    """Prompts with 0 to 4 images."""
    assert llm.tokenizer is not None
    expanded = []
    for num in range(5):
        prompt = prompt_of(checkpoint, draw_parts(checkpoint, 20 * num, num))
        token_ids = llm.tokenizer.encode(prompt["prompt"])
        expanded.append(with_images(token_ids, prompt["images"], llm.engine.features.images.layout))
    return expanded


def kv_by(llm: LLM, prompts: Sequence[Expanded]) -> Callable[[list[int]], torch.Tensor]:
    """Return a function that computes a prompt's KV in one process, given its tokens."""

    def kv(token_ids: list[int]) -> torch.Tensor:
        images = next(images for prompt, images in prompts if token_ids[: len(prompt)] == prompt)
        engine = llm.engine
        request = Request.create(
            "kv",
            token_ids,
            SamplingParams(max_tokens=2, ignore_eos=True),
            seed=0,
            eos_token_ids=frozenset(),
            max_model_len=engine.max_model_len,
            images=engine.features.images.of_prompt(images, token_ids),
        )
        engine.add_request(request)
        while request.num_output_tokens < 1:
            engine.step()
        found = kv_of(engine, request.block_ids, len(token_ids))
        engine.abort("kv")
        return found

    return kv


@pytest.fixture
def cluster(checkpoint: VisionCheckpoint, llm: LLM, prompts: list[Expanded]) -> Cluster:
    cluster = Cluster(
        checkpoint.folder,
        kv_by(llm, prompts),
        NUM_BLOCKS,
        options=DecodeOptions(local_prefill_threshold=8),
        preemption="hand-back",
        engine_options={"dtype": "float32", "num_threads": 1},
    )
    for engine in (cluster.p.engine, cluster.d.engine):
        decode_inline(engine, preprocessor(checkpoint.folder))
    return cluster


def expected(llm: LLM, prompt: Expanded) -> list[int]:
    token_ids, images = prompt
    request = Request.create(
        "alone",
        token_ids,
        GREEDY,
        seed=0,
        eos_token_ids=frozenset(),
        max_model_len=llm.engine.max_model_len,
        images=llm.engine.features.images.of_prompt(images, token_ids),
    )
    llm.engine.add_request(request)
    while llm.engine.requests:
        llm.engine.step()
    return request.output_token_ids


def tokens_of(cluster: Cluster, request_id: str, epoch: int = 1) -> list[int]:
    attempt = cluster.attempts[request_id, epoch]
    assert not attempt.error, attempt.error
    return [attempt.tokens[index] for index in range(NUM_TOKENS)]


def test_a_split_system_gives_the_tokens_of_one_process(
    cluster: Cluster, llm: LLM, prompts: list[Expanded]
) -> None:
    for index, (token_ids, images) in enumerate(prompts):
        cluster.place(f"r{index}", 1, token_ids, GREEDY, images=images)
    cluster.settle()
    wanted = [expected(llm, prompt) for prompt in prompts]
    assert [tokens_of(cluster, f"r{index}") for index in range(5)] == wanted
    assert cluster.p.engine.metrics().images_encoded_total == 10
    encoded = cluster.d.engine.metrics().images_encoded_total
    assert encoded == 0, "a decode node encodes nothing"
    shown = [one.attributes for one in cluster.spans if one.name == "prefill"]
    counts = ("baton.images_encoded", "baton.encodings_cached")
    assert [tuple(one.get(name) for name in counts) for one in shown] == [
        (None, None), *((number, 0) for number in (1, 2, 3, 4))
    ]  # fmt: skip
    assert all(("baton.pixels_wait_s" in one) == bool(one.get(counts[0])) for one in shown)
    # Both nodes know the prompts now; a retry continues an output.
    token_ids, images = prompts[3]
    cluster.place("again", 1, token_ids, GREEDY, images=images)
    cluster.place("retry", 2, token_ids, GREEDY, wanted[3][:3], images=images)
    cluster.settle()
    assert tokens_of(cluster, "again") == tokens_of(cluster, "retry", 2) == wanted[3]
    assert cluster.d.engine.metrics().cached_prompt_tokens_total > 0
    assert cluster.d.engine.metrics().images_encoded_total == 0


def test_a_decode_node_without_prefill_node_encodes(
    cluster: Cluster, llm: LLM, prompts: list[Expanded]
) -> None:
    token_ids, images = prompts[2]
    cluster.place("r", 1, token_ids, GREEDY, alone=True, images=images)
    cluster.settle()
    assert tokens_of(cluster, "r") == expected(llm, prompts[2])
    assert cluster.d.engine.metrics().images_encoded_total == 2


def test_a_node_reports_prompts_whose_files_it_decodes(
    cluster: Cluster, prompts: list[Expanded], monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, images = prompts[1]
    with monkeypatch.context() as held:
        held.setattr(cluster.p.engine.features.images._pixels, "take_ready", list)
        cluster.place("r", 1, token_ids, GREEDY, images=images)
        cluster.step("p")
        beat = cluster.p.beat()
        assert (beat.num_waiting, beat.num_decoding_images) == (1, 1)
        assert beat.num_waiting_for_encodings == 0
    cluster.settle()
    assert cluster.p.beat().num_decoding_images == 0
    assert len(tokens_of(cluster, "r")) == NUM_TOKENS


def test_bad_images_end_their_request_in_one_line(
    cluster: Cluster, llm: LLM, prompts: list[Expanded]
) -> None:
    token_ids, [image] = prompts[1]
    broken = PromptImage(image.span, b"\x89PNG broken")
    outside = PromptImage(type(image.span)(len(token_ids), 4, image.span.digest), image.data)
    cases = {
        "broken": ([broken], "images[0]: the file cannot be decoded"),
        "outside": ([outside], f"images[0]: lies outside the prompt of {len(token_ids)} tokens"),
        "no file": (
            [PromptImage(image.span)],
            "images: came without files to the node that encodes them",
        ),
    }
    for name, (images, _) in cases.items():
        cluster.place(name, 1, token_ids, GREEDY, images=images)
    cluster.place("good", 1, token_ids, GREEDY, images=[image])
    cluster.settle()
    for name, (_, problem) in cases.items():
        attempt = cluster.attempts[name, 1]
        assert (attempt.error_code, attempt.error) == ("INVALID_ARGUMENT", problem)
    assert tokens_of(cluster, "good") == expected(llm, prompts[1])
    assert cluster.p.engine.block_pool.num_free == NUM_BLOCKS
