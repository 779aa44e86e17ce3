"""Unit tests of DescriptorWaker: what ends a wait, and which descriptors it stops watching."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kvconnector.waker import DescriptorWaker, make_waker

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="needs eventfd (Linux)")
LONG_S = 60.0  # a wait that never ends exceeds the test's time limit


class Scene:
    """A waker over a pipe."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        self.waker = DescriptorWaker(self.read_end)

    def write(self) -> None:
        os.write(self._write_end, b"x")

    def close(self) -> None:
        del self.waker
        for end in (self.read_end, self._write_end):
            os.close(end)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_a_set_flag_ends_one_wait_until_it_is_cleared(scene: Scene) -> None:
    scene.waker.set()
    scene.waker.set()
    assert scene.waker.wait(LONG_S)
    assert scene.waker.wait(LONG_S)
    scene.waker.clear()
    assert not scene.waker.wait(0.0)
    scene.waker.set()
    assert scene.waker.wait(LONG_S)


def test_another_thread_ends_a_wait(scene: Scene) -> None:
    thread = threading.Thread(target=scene.waker.set)
    thread.start()
    assert scene.waker.wait(LONG_S)
    thread.join()


def test_a_readable_descriptor_ends_waits(scene: Scene) -> None:
    assert not scene.waker.wait(0.0)
    scene.write()
    assert scene.waker.wait(LONG_S)
    os.read(scene.read_end, 1)
    assert not scene.waker.wait(0.0)


def test_a_wait_for_the_flag_is_not_ended_by_the_descriptor(scene: Scene) -> None:
    scene.write()
    assert not scene.waker.wait_for_flag(0.0)
    scene.waker.set()
    assert scene.waker.wait_for_flag(LONG_S)


def test_a_descriptor_that_is_always_readable_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DescriptorWaker, "MAX_WAKES_PER_S", 10)
    scene.write()
    for _ in range(1000):
        if not scene.waker.listens:
            break
        assert scene.waker.wait(LONG_S)
    assert not scene.waker.listens
    assert not scene.waker.wait(0.0)
    scene.waker.set()
    assert scene.waker.wait(LONG_S)


def test_a_descriptor_that_was_given_up_is_watched_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after one burst of messages, the thread polled for the life of the node."""
    monkeypatch.setattr(DescriptorWaker, "MAX_WAKES_PER_S", 10)
    scene.write()
    for _ in range(1000):
        if not scene.waker.listens:
            break
        assert scene.waker.wait(LONG_S)
    assert not scene.waker.wait(0.0)
    monkeypatch.setattr(DescriptorWaker, "IGNORE_S", 0.0, raising=False)
    assert scene.waker.wait(LONG_S)
    assert scene.waker.listens
    os.read(scene.read_end, 1)
    assert not scene.waker.wait(0.0)


def test_without_a_descriptor_an_event_is_enough() -> None:
    assert isinstance(make_waker(None), threading.Event)
