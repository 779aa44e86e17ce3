"""Unit tests of AdapterTable: slots are given, kept and freed; adapters are read again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from baton.adapters.digest import AdapterError
from baton.adapters.files import Adapter, AdapterFiles
from baton.api.errors import (
    ConfigError,
    NodeUnavailableError,
    NotFoundError,
    OverloadedError,
    status_name,
)
from engine.adapters import AdapterTable, ReadAdapter
from engine.executors.base import Executor
from tests.fakes.adapter_files import pair, write_adapter


class Worker:
    """Notes what it is asked for, and accepts adapters of 32 inputs only."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.problem: AdapterError | None = None

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        [argument] = args
        if method == "load_adapter":
            if self.problem is not None:
                raise self.problem
            self.loaded.append(argument.digest)
        else:
            self.unloaded.append(argument)
            self.loaded = [digest for digest in self.loaded if digest != argument]
        return [100]

    def pack_adapter(self, adapter: Adapter) -> int:
        if self.problem is not None:
            raise self.problem
        return 100

    def keep_cores(self) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def check_adapter(files: AdapterFiles) -> None:
        for module in files.modules.values():
            if module.a.shape[1] != 32:
                raise files.wrong(module.a, "does not fit")


class Scene:
    """A table of ``slots``, and adapters on disk by number."""

    def __init__(self, root: Path, slots: int = 2, cache_bytes: int = 10**6) -> None:
        self.worker, self._root, self.in_use = Worker(), root, set[str]()
        self.table = AdapterTable(
            cast("Executor", self.worker), slots, cache_bytes, lambda: self.in_use
        )

    def read(self, number: int) -> ReadAdapter:
        return self.table.read(write_adapter(self._root / str(number), pair(seed=10 * number)))

    def load(self, number: int, *, pinned: bool = False, kept: Sequence[str] = ()) -> str:
        adapter = self.read(number)
        self.table.load(adapter, pinned=pinned, kept=kept)
        return adapter.digest


def test_the_least_recently_used_one_leaves(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    one, two = scene.load(1), scene.load(2)
    scene.table.acquire(one)
    three = scene.load(3)
    assert scene.worker.loaded == [one, three]
    assert scene.table.digests == (one, three)
    with pytest.raises(NodeUnavailableError, match=rf"^adapter: {two[:12]} is not loaded here$"):
        scene.table.acquire(two)
    scene.table.acquire("")
    scene.load(3)
    assert scene.worker.loaded == [one, three], "loaded twice"


def test_pinned_and_used_ones_stay(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    one, two = scene.load(1, pinned=True), scene.load(2)
    with pytest.raises(OverloadedError, match="all 2 adapters are pinned or in use") as caught:
        scene.load(3, kept=[two])
    assert status_name(caught.value) == "RESOURCE_EXHAUSTED"
    assert scene.worker.loaded == [one, two]
    scene.load(1)  # no longer pinned
    scene.in_use = {two}
    scene.load(3)
    assert one not in scene.worker.loaded


def test_an_adapter_leaves_with_its_last_request(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    one = scene.load(1)
    scene.in_use = {one}
    assert not scene.table.unload(one)
    assert scene.table.digests == ()
    with pytest.raises(NodeUnavailableError):
        scene.table.acquire(one)
    scene.table.settle()
    assert scene.worker.loaded == [one]
    scene.in_use.clear()
    scene.table.settle()
    assert scene.worker.loaded == []
    with pytest.raises(NotFoundError):
        scene.table.unload(one)


def test_an_adapter_that_comes_back_stays(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    one = scene.load(1)
    scene.in_use = {one}
    scene.table.unload(one)
    assert scene.table.load_again(one)
    scene.in_use.clear()
    scene.table.settle()
    assert scene.worker.loaded == [one]


def test_numbers_of_earlier_adapters_are_kept_up_to_a_limit(tmp_path: Path) -> None:
    size = Scene(tmp_path).read(1).num_bytes
    scene = Scene(tmp_path, slots=1, cache_bytes=2 * size)
    one, two, three = (scene.load(number) for number in (1, 2, 3))
    assert scene.table.load_again(two, pinned=True)
    assert scene.worker.loaded == [two]
    assert not scene.table.load_again(one), "beyond the limit"
    with pytest.raises(OverloadedError):
        scene.table.load_again(three)


def test_an_adapter_that_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with pytest.raises(AdapterError, match="does not fit"):
        scene.table.read(write_adapter(tmp_path / "wide", pair(inputs=33)))
    read = scene.read(1)
    digest = read.digest
    scene.worker.problem = AdapterError("a number is too large")
    with pytest.raises(AdapterError, match="too large"):
        scene.read(1)
    with pytest.raises(AdapterError, match="too large"):
        scene.table.load(read)
    with pytest.raises(AdapterError, match=f"has the digest {digest}, not 12"):
        scene.table.read(tmp_path / "1", "12")
    assert scene.table.views() == []
    assert scene.worker.unloaded == [digest], "some ranks may have loaded it"
    assert not scene.table.load_again(digest)


def test_without_slots_nothing_is_read(tmp_path: Path) -> None:
    scene = Scene(tmp_path, slots=0)
    with pytest.raises(ConfigError, match=r"^max_adapters: is 0"):
        scene.table.read(tmp_path / "nowhere")
