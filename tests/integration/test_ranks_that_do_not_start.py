"""Ranks whose start fails leave nothing open in the engine's process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from engine import LLM
from tests.fakes.checkpoints.demo_model import DEMO_MODEL


def shared_memories() -> list[str]:
    """Return the open descriptors of memory that ranks share."""
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return [one.name for one in links if "baton-ranks" in str(one.readlink())]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists open files like this")
def test_a_failed_start_leaves_no_shared_memory_open() -> None:
    before = shared_memories()
    options = {"tensor_parallel_size": 2, "expert_parallel": "on", "num_threads": 1}
    with pytest.raises(ConfigError, match="the model has no experts"):
        LLM(str(DEMO_MODEL), **options)
    assert shared_memories() == before
