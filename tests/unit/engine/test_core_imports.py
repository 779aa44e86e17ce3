"""Tests that the engine's core imports no tensors and none of the link's messages."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import engine.core
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

_UNWANTED = ("torch", "grpc", "baton.link", "engine.worker", "baton_kernels")


CORE = [f"engine.core.{found.name}" for found in pkgutil.iter_modules(engine.core.__path__)]


def test_there_is_a_core() -> None:
    assert "engine.core.scheduler" in CORE


@pytest.mark.medium
@pytest.mark.parametrize(
    "modules",
    [
        CORE,
        ["engine.executors", "engine.executors.base"],
        ["engine.engine"],
        ["engine.make_engine"],
    ],
)
def test_the_core_loads_no_torch_and_no_link(modules: list[str]) -> None:
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*[name for name in {_UNWANTED!r} if name in sys.modules])
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == []


@pytest.mark.medium
def test_an_engine_on_a_cpu_does_not_load_the_compiler() -> None:
    """Check that torch's compiler is not imported, the slowest part of a node's start."""
    model = DEMO_MODEL
    code = f"""
import sys
from pathlib import Path
from baton import LLM, SamplingParams
LLM({str(model)!r}, device="cpu").generate("hello", SamplingParams(max_tokens=4))
print(*[name for name in ("torch._dynamo", "sympy", "triton") if name in sys.modules])
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == []
