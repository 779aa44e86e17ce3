"""An image that stands for tokens is answered like these tokens: chunks, caches, preemption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from baton.api.errors import InvalidRequestError, OverloadedError
from baton.api.images import Grid, ImageSpan, PromptImage
from baton.api.sampling_params import SamplingParams
from engine.core.images.image_plan import PixelArray
from engine.core.images.prompt_images import encoding_of
from engine.core.request import Request
from engine.engine import Engine
from engine.executors.uniproc import worker_of
from engine.images.image_inputs import ImageInputs, set_pixels
from tests.fakes.engine.demo_engine import load_demo
from tests.fakes.images.fake_images import (
    PLACEHOLDER,
    FakeEncoder,
    FakeLayout,
    file_of,
    images_of,
    pixels_of,
    prompt_with,
)

A, B = file_of(range(100, 121)), file_of(range(300, 305))
PROMPT: list[Sequence[int] | bytes] = [range(20, 30), A, range(40, 44), B, range(50, 57)]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = load_demo(max_num_batched_tokens=64, max_num_requests=8, block_size=4)
    yield engine
    engine.close()


def encoder_of(engine: Engine) -> FakeEncoder:
    """Return the engine's encoder, which it gets at the first call."""
    model: Any = worker_of(engine.executor).runner._model
    if model.vision is None:
        model.vision = FakeEncoder(model.model.embed_tokens)
    encoder: FakeEncoder = model.vision
    return encoder


def as_text(parts: Sequence[Sequence[int] | bytes]) -> list[int]:
    """Return the prompt with the tokens that its images stand for."""
    token_ids: list[int] = []
    for part in parts:
        token_ids += map(int, part.split(b",")) if isinstance(part, bytes) else part
    return token_ids


def request_of(
    name: str, parts: Sequence[Sequence[int] | bytes], params: SamplingParams = GREEDY
) -> Request:
    token_ids, images = prompt_with(parts)
    of_prompt = images_of(images, token_ids) if images else None
    if of_prompt is not None:
        of_prompt.pixels = {d: pixels_of(data) for d, data in of_prompt.files.items()}
    return Request.create(
        name,
        token_ids,
        params,
        seed=0,
        eos_token_ids=frozenset(),
        max_model_len=120,
        images=of_prompt,
    )


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        result = engine.step()
        engine.check()
        for output in result.outputs:
            outputs[output.request_id] += output.token_ids
        make_wanted(engine)
    return outputs


def make_wanted(engine: Engine) -> None:
    """Decode the images of preempted requests once more."""
    wanted = engine._scheduler.images.wanted
    while wanted:
        images = wanted.pop()
        images.pixels = {digest: pixels_of(data) for digest, data in images.files.items()}
        set_pixels(engine._scheduler, images)


def expected(parts: Sequence[Sequence[int] | bytes]) -> list[int]:
    engine = load_demo(prefix_cache=False)
    request = Request.create(
        "text", as_text(parts), GREEDY, seed=0, eos_token_ids=frozenset(), max_model_len=120
    )
    tokens = run(engine, request)["text"]
    engine.close()
    return tokens


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_any_chunk_may_end_within_an_image(chunk: int) -> None:
    engine = load_demo(long_prefill_token_threshold=chunk, block_size=4)
    encoder = encoder_of(engine)
    assert run(engine, request_of("a", PROMPT))["a"] == expected(PROMPT)
    assert encoder.num_encoded == 2
    engine.close()


def test_a_hit_may_end_within_an_image_or_behind_it(engine: Engine) -> None:
    encoder = encoder_of(engine)
    run(engine, request_of("a", PROMPT))
    for parts in ([*PROMPT[:4], range(90, 97)], [*PROMPT[:2], range(90, 97)], PROMPT):
        request = request_of("b", parts)
        assert run(engine, request)["b"] == expected(parts)
        assert request.num_hit_tokens >= 28
    assert encoder.num_encoded == 2
    metrics = engine.metrics()
    assert metrics.images_encoded_total == 2
    assert metrics.encoder_seconds_total > 0


@pytest.mark.parametrize("budget", [1, 1000])
def test_the_encoding_of_another_node_takes_the_place_of_pixels(budget: int) -> None:
    """A received encoding costs no budget, and the other image is encoded here."""
    engine = load_demo(max_num_encoder_input_tokens=budget, block_size=4)
    encoder = encoder_of(engine)
    request = request_of("a", PROMPT)
    images = request.images
    assert images is not None
    assert images.pixels is not None
    first, second = images.pixels
    tokens = pixels_of(A).arrays[0]
    numbers = torch.frombuffer(bytearray(tokens.data), dtype=torch.int64)
    rows = encoder._embedding(numbers).detach()
    array = PixelArray("", "float32", tuple(rows.shape), rows.float().numpy().tobytes())
    images.pixels = {first: encoding_of(array), second: images.pixels[second]}
    assert run(engine, request)["a"] == expected(PROMPT)
    assert encoder.num_encoded == 1
    metrics = engine.metrics()
    assert (metrics.images_encoded_total, metrics.encodings_received_total) == (1, 1)
    assert (request.num_images_encoded, request.num_encodings_cached) == (1, 0)
    assert request.encoder_s == metrics.encoder_seconds_total > 0
    engine.close()


def test_other_images_hit_nothing(engine: Engine) -> None:
    encoder_of(engine)
    run(engine, request_of("a", PROMPT))
    other = [PROMPT[0], file_of(range(200, 221)), *PROMPT[2:]]
    request = request_of("b", other)
    assert run(engine, request)["b"] == expected(other)
    assert request.num_hit_tokens == 8  # the blocks before the image


def test_an_image_in_many_prompts_is_encoded_once(engine: Engine) -> None:
    encoder = encoder_of(engine)
    prompts = [[[index] * 5, A, [index] * 3] for index in range(20, 28)]
    requests = [request_of(str(i), prompt) for i, prompt in enumerate(prompts)]
    outputs = run(engine, *requests)
    assert list(outputs.values()) == [expected(prompt) for prompt in prompts]
    assert encoder.num_encoded == 1
    assert engine.metrics().encoder_cache_hits_total == 7
    assert [request.num_images_encoded for request in requests] == [1, *[0] * 7]
    assert [request.num_encodings_cached for request in requests] == [0, *[1] * 7]


def test_encodings_leave_for_others_and_are_made_again() -> None:
    engine = load_demo(encoder_cache_tokens=25, prefix_cache=False, max_num_requests=2)
    encoder = encoder_of(engine)
    prompts = [PROMPT, [B, range(9), A], PROMPT]
    outputs = run(engine, *(request_of(str(i), prompt) for i, prompt in enumerate(prompts)))
    assert list(outputs.values()) == [expected(prompt) for prompt in prompts]
    assert encoder.num_encoded >= 4
    assert len(worker_of(engine.executor).runner.extras.encodings) == 1
    engine.close()


def test_preempted_requests_compute_their_images_again() -> None:
    engine = load_demo(block_size=4, prefix_cache=False)
    encoder_of(engine)
    long = SamplingParams(max_tokens=30, temperature=0)
    requests = [request_of(str(index), PROMPT, long) for index in range(2)]
    outputs = run(engine, *requests)
    assert engine.metrics().preemptions_total > 0
    assert outputs["0"] == outputs["1"]
    assert outputs["0"][:6] == expected(PROMPT)
    engine.close()


def test_samples_of_one_prompt_share_its_images(engine: Engine) -> None:
    encoder = encoder_of(engine)
    parts = [range(20, 30), A]  # the last block lies in the image
    first, second = request_of("a", parts), request_of("b", parts)
    second.images = first.images
    first.siblings = [second]
    outputs: dict[str, list[int]] = {"a": [], "b": []}
    engine.add_request(first)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id] += output.token_ids
    assert outputs["a"] == outputs["b"] == expected(parts)
    assert encoder.num_encoded == 1
    assert first.images is not None
    assert first.images.pixels is None, "no request needs them"


def test_an_encoding_without_numbers_ends_its_requests_alone(engine: Engine) -> None:
    encoder_of(engine)
    broken = [range(5), file_of([3, -1, 4]), range(5)]
    requests = [request_of("a", broken), request_of("b", PROMPT), request_of("c", broken)]
    outputs = run(engine, *requests)
    failures = dict(engine.take_failures())
    assert set(failures) == {"a", "c"}
    assert str(failures["a"]) == "images[0]: its encoding has NaN or infinite numbers"
    assert outputs["b"] == expected(PROMPT)
    assert len(worker_of(engine.executor).runner.extras.encodings) == 2


def test_an_encoder_that_raises_ends_its_request_alone(engine: Engine) -> None:
    encoder_of(engine)
    outputs = run(
        engine, request_of("a", [range(5), file_of([3, 10**9, 4])]), request_of("b", PROMPT)
    )
    ((name, error),) = engine.take_failures()
    assert (name, str(error)) == ("a", "images[0]: the encoder failed: IndexError")
    assert outputs["b"] == expected(PROMPT)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_too_little_memory_for_an_image_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A retry may succeed on another node, or later on this node."""
    large = [range(5), file_of([3, 5, 4]), range(5)]
    encoder = encoder_of(engine)
    encode = encoder.encode

    def encode_small(pixels: Any) -> torch.Tensor:
        if len(pixels["tokens"]) == 3:
            raise error
        return encode(pixels)

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "encode", encode_small)
        outputs = run(engine, request_of("a", large), request_of("b", PROMPT))
    ((name, found),) = engine.take_failures()
    assert isinstance(found, OverloadedError)
    why = "images[0]: this node has too little memory to encode it"
    assert (name, str(found)) == ("a", why)
    assert outputs["b"] == expected(PROMPT)
    assert run(engine, request_of("c", large))["c"] == expected(large)


def test_other_weights_encode_images_again(engine: Engine) -> None:
    encoder = encoder_of(engine)
    run(engine, request_of("a", PROMPT))
    engine.rename_cache({**engine.compatibility, "weights": "new"})
    worker_of(engine.executor).runner.extras.encodings._kept.clear()  # a new runner has none
    assert run(engine, request_of("b", PROMPT))["b"] == expected(PROMPT)
    assert encoder.num_encoded == 4


def test_a_missing_encoding_ends_its_request(engine: Engine) -> None:
    encoder_of(engine)
    run(engine, request_of("a", [A, range(5)]))
    worker_of(engine.executor).runner.extras.encodings._kept.clear()
    assert run(engine, request_of("b", [range(5), A]))["b"] == []
    ((_, error),) = engine.take_failures()
    assert str(error) == "images[0]: its encoding is missing"
    assert run(engine, request_of("c", [range(5), A]))["c"] == expected([range(5), A])


def test_a_request_without_files_is_handed_back_if_its_cached_images_leave(engine: Engine) -> None:
    encoder_of(engine)
    run(engine, request_of("a", PROMPT))
    request = request_of("b", PROMPT)
    assert request.images is not None
    request.images.files, request.images.pixels = {}, None
    assert request.images.may_compute_from(
        engine.kv_cache_manager.num_usable_cached_tokens(request)
    )
    num_free = engine.block_pool.num_free
    engine.add_request(request)
    engine.block_pool.reset_prefix_cache()
    engine.step()
    engine.check()
    assert engine.take_handed_back() == [request]
    assert not engine.requests
    assert engine.block_pool.num_free == num_free


@pytest.mark.parametrize("grid", [(1, 2, 3), (1, 1, 4), (0, 5, 1), (1, 2**32 - 1, 2**32 - 1)])
def test_a_grid_that_does_not_fit_its_tokens_is_refused(grid: Grid) -> None:
    """The engine's thread computes three-axis positions from the grid."""
    span = ImageSpan(1, 5, b"d" * 16, grid)
    images, token_ids = [PromptImage(span, b"file")], [1, *[PLACEHOLDER] * 5, 1]
    intake = ImageInputs(FakeLayout(), most_tokens=100, has_three_axes=True)
    with pytest.raises(InvalidRequestError, match=r"images\[0\]: its grid .* tokens, 5$"):
        intake.of_prompt(images, token_ids)
    fits = PromptImage(ImageSpan(1, 5, b"d" * 16, (1, 5, 1)), b"file")
    assert intake.of_prompt([fits], token_ids) is not None
    assert ImageInputs(FakeLayout(), most_tokens=100).of_prompt(images, token_ids) is not None


def test_images_that_do_not_fit_their_prompt_are_refused() -> None:
    def refusal(span: ImageSpan) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            images_of([PromptImage(span, b"file")], [7] * 5 + [1] * 5)
        return str(caught.value)

    digest = b"d" * 16
    assert refusal(ImageSpan(8, 3, digest)) == "images[0]: lies outside the prompt of 10 tokens"
    assert refusal(ImageSpan(-1, 3, digest)) == "images[0]: lies outside the prompt of 10 tokens"
    assert refusal(ImageSpan(0, 3, b"d")) == "images[0]: its digest must have 16 bytes, got 1"
    assert refusal(ImageSpan(6, 3, digest)) == "images[0]: has no placeholder in the prompt"
