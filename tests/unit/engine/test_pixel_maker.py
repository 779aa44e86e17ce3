"""Media processes: a file that ends or exhausts its process costs only its own requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.processes.worker_processes import WorkLimits
from engine.core.images.prompt_images import PromptImages
from engine.images.pixel_maker import PixelMaker
from tests.fakes.images.fake_images import PROCESSOR, file_of, images_of, pixels_of, prompt_with

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[3]
LIMITS = WorkLimits(cpu_s=0.3, wall_s=20.0, memory_bytes=2**28)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Iterator[PixelMaker]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # media processes import this test's processor
    maker = PixelMaker(ROOT, PROCESSOR, LIMITS)
    yield maker
    maker.close()


def prompt(*files: bytes) -> PromptImages:
    """Return the images of a prompt that some request needs."""
    token_ids, images = prompt_with([part for file in files for part in ([1], file)])
    found = images_of(images, token_ids)
    found.add_user("a")
    return found


def make_all(maker: PixelMaker, prompts: Sequence[PromptImages]) -> list[str]:
    """Make pixel values; return each prompt's error, or an empty text."""
    for one in prompts:
        maker.submit(one)
    outcomes: dict[int, str] = {}
    while maker.is_busy:
        for ready, error in maker.take_ready():
            outcomes[id(ready)] = str(error or "")
        if maker.is_busy:
            maker.wait()
    return [outcomes[id(one)] for one in prompts]


def test_hostile_files_end_only_their_own_prompts(maker: PixelMaker) -> None:
    good = file_of(range(9))
    files = [b"bad", good, b"die", b"spin", b"bomb", b"no number"]
    prompts = [prompt(good, file) for file in files]
    errors = make_all(maker, prompts)
    limit = "cannot be decoded within 0.3 s and 256 MiB of memory"
    assert errors == [
        "images[1]: the file cannot be decoded",
        "",
        f"images[1]: {limit}",
        f"images[1]: {limit}",
        f"images[1]: {limit}",
        f"images[1]: {limit}",
    ]
    for one, error in zip(prompts, errors, strict=True):
        assert (one.pixels is None) is bool(error)
    pixels = prompts[1].pixels
    assert pixels is not None
    assert next(iter(pixels.values())).arrays == pixels_of(good).arrays
    again = prompt(file_of([5]))
    assert make_all(maker, [again]) == [""], "the processes are replaced"


def test_prompts_share_the_pixel_values_of_an_image(maker: PixelMaker) -> None:
    maker.start()
    first, second, alone = prompt(b"1,2"), prompt(b"3", b"1,2"), prompt(b"4")
    alone.users.clear()  # its request has ended meanwhile
    for one in (first, second, alone):
        maker.submit(one)
    while maker.is_busy:
        maker.wait()
        maker.take_ready()
    digest = first.spans[0].digest
    assert first.pixels is not None
    assert second.pixels is not None
    assert first.pixels[digest] is second.pixels[digest]
    assert alone.pixels is None
    later = prompt(b"1,2")
    maker.submit(later)
    assert maker.take_ready() == [(later, None)], "kept for later prompts"


def test_prompts_that_come_at_once_take_turns_in_memory(
    maker: PixelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.images.pixel_maker.MAX_OPEN_BYTES", 2_000)
    monkeypatch.setattr("engine.images.pixel_maker.MAX_KEPT_BYTES", 0)
    prompts = [prompt(file_of([number] * 100)) for number in range(12)]  # 800 bytes each
    for one in prompts:
        maker.submit(one)
    num_done = 0
    while num_done < len(prompts):
        maker.wait()
        ready = maker.take_ready()
        assert sum(one.pixels is not None for one in prompts) <= 3
        for one, _ in ready:
            one.remove_user("a")
        num_done += len(ready)


def test_prompts_know_how_long_they_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    times = iter((10.0, 12.5, 20.0, 20.25))
    maker = PixelMaker(ROOT, PROCESSOR, LIMITS, lambda: next(times))
    one = prompt(b"1,2")
    assert make_all(maker, [one]) == [""]
    assert one.pixels_wait_s == 2.5
    assert make_all(maker, [one]) == [""], "as after a preemption"
    assert one.pixels_wait_s == 2.75
    maker.close()


def test_an_answer_that_cannot_be_read_ends_its_prompt(
    maker: PixelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.images.pixel_maker.read_answer", lambda answer: 1 // 0)
    assert make_all(maker, [prompt(b"1")]) == [
        "images: a file could not be decoded here; try again"
    ]
