"""Unit test of what the engine's core loads: no tensors, and nothing that the link says."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import engine.core

_UNWANTED = ("torch", "grpc", "baton.link", "engine.worker", "engine.sampling", "baton_kernels")


def test_the_core_loads_no_torch_and_no_link() -> None:
    modules = [f"engine.core.{found.name}" for found in pkgutil.iter_modules(engine.core.__path__)]
    assert "engine.core.scheduler" in modules
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*[name for name in {_UNWANTED!r} if name in sys.modules])
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == []
