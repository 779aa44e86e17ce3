"""The images that an encode node measures at its start show how much memory pixel values take."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageTokens
from encode_node.threads import MEASURED_SIDES, measure_encode_times
from engine.core.images.prompt_images import ImagePixels
from engine.images.pixel_maker import PixelMaker
from tests.fakes.images.fake_images import (
    PLACEHOLDER,
    PROCESSOR,
    file_of,
    images_of,
    prompt_with,
)

pytestmark = pytest.mark.medium


class Layout:
    """A token per 64 pixels, as the fake processor has it."""

    marker = written = "<image>"
    marker_token_id = placeholder_token_id = PLACEHOLDER
    settings = b""

    def __init__(self, most_pixels: int = 2**20) -> None:
        self._most_pixels = most_pixels

    def expand(self, width: int, height: int) -> ImageTokens:
        if width * height > self._most_pixels:
            raise InvalidRequestError("image", "is too large")
        num_tokens = width * height // 64
        return ImageTokens((PLACEHOLDER,) * num_tokens, (1, 1, num_tokens))


def encode(pixels: ImagePixels) -> Sized:
    return range(pixels.num_bytes // 8)


def test_the_first_burst_stays_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", str(root))  # media processes import this test's processor
    monkeypatch.setattr("engine.images.pixel_maker.MAX_KEPT_BYTES", 0)
    maker = PixelMaker(root, PROCESSOR)
    try:
        times = measure_encode_times(encode, maker, Layout())
        assert [one.num_tokens for one in times] == [side * side // 64 for side in MEASURED_SIDES]
        small = measure_encode_times(encode, maker, Layout(most_pixels=MEASURED_SIDES[0] ** 2))
        assert len(small) == 1, "an image that the model refuses is not measured"
        monkeypatch.setattr("engine.images.pixel_maker.MAX_OPEN_BYTES", 2_000)
        prompts = []
        for number in range(12):  # 800 bytes each
            tokens, images = prompt_with([file_of([number] * 100)])
            prompts.append(images_of(images, tokens))
            prompts[-1].add_user("a")
            maker.submit(prompts[-1])
        num_done = 0
        while num_done < len(prompts):
            maker.wait()
            ready = maker.take_ready()
            assert sum(one.pixels is not None for one in prompts) <= 3
            for one, _ in ready:
                one.remove_user("a")
            num_done += len(ready)
    finally:
        maker.close()
