"""Test how a node's program loads its model."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import pytest

from baton.api.errors import ModelLoadError
from node_runtime.node_program import NodeProgram, _make_or_stop


def test_the_thread_that_loads_a_model_has_ended_when_the_node_begins() -> None:
    loaders: list[threading.Thread] = []

    node = cast("NodeProgram", object())

    def make() -> NodeProgram:
        loaders.append(threading.current_thread())
        return node

    async def load() -> list[bool]:
        assert await _make_or_stop(make, asyncio.Event(), []) is node
        return [loader.is_alive() for loader in loaders]

    assert asyncio.run(load()) == [False]


def test_a_model_that_cannot_be_loaded_is_told_to_the_caller() -> None:
    def make() -> NodeProgram:
        raise ModelLoadError("no such model")

    with pytest.raises(ModelLoadError, match="no such model"):
        asyncio.run(_make_or_stop(make, asyncio.Event(), []))
