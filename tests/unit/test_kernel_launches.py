"""Tests of kernel launches over a driver that counts: equal to Triton's, without asking Triton."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[2]
# Run where Triton is not the interpreter that tests/kernels ask for: in a process of its own.
SCRIPT = """
import json, sys
import torch
from benchmarks.engine.fake_gpu import FakeDriver
driver = FakeDriver()
from baton_kernels.triton.launch import Launcher
from baton_kernels.triton.silu_mul import BLOCK, silu_mul_kernel
from triton import knobs

driver.watch(6)  # two addresses, two numbers, and two that Triton adds
SIZES = (8, 8, 4, 4, 8, 8)

def last():
    function, grid, parameters = driver.last_launch
    return function, grid, [p % 256**size for p, size in zip(parameters, SIZES)]

memory = torch.zeros(4096, dtype=torch.float32)
out = torch.zeros(512)
launch = Launcher(silu_mul_kernel, BLOCK=BLOCK, ACTIVATION="silu", PDL=False, num_warps=4)
found = {}

def compare(name, x, numbers):
    asked = driver.num_pointer_queries
    launch((2, 1), (x, out), numbers)  # Triton finds the variant
    launch((2, 1), (x, out), numbers)
    first = driver.num_pointer_queries - asked
    launch((2, 1), (x, out), numbers)
    again, ours = driver.num_pointer_queries - asked - first, last()
    silu_mul_kernel[2, 1](
        x, out, *numbers, BLOCK=BLOCK, ACTIVATION="silu", PDL=False, num_warps=4
    )
    assert ours[2][:4] == [x.data_ptr(), out.data_ptr(), *numbers], ours
    found[name] = [first, again, ours == last(), ours[0]]

compare("aligned", memory[:1024], (512, 256))
compare("moved", memory[1024:2048], (512, 256))
compare("odd address", memory[1:1025], (512, 256))
compare("another stride", memory[:1024], (513, 256))
compare("another dtype", memory.to(torch.bfloat16)[:1024], (512, 256))
compare("aligned again", memory[:1024], (512, 256))
found["launches"] = driver.num_launches
told = []
knobs.runtime.launch_enter_hook.add(lambda metadata: told.append(metadata))
launch((2, 1), (memory[:1024], out), (512, 256))
found["told"] = len(told)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # another release of Triton, say
    path = os.pathsep.join([*filter(None, others), str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NAMES = ("aligned", "moved", "odd address", "another stride", "another dtype", "aligned again")


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_gives_the_driver_what_triton_would_give_it(found: Any, name: str) -> None:
    _, _, equal, _ = found[name]
    assert equal


@pytest.mark.parametrize("name", NAMES)
def test_a_known_launch_does_not_ask_triton(found: Any, name: str) -> None:
    first, again, _, _ = found[name]
    is_known = name in ("moved", "aligned again")  # a tensor that moved is no other variant
    assert (first, again) == (0 if is_known else 2, 0)


def test_other_alignments_strides_and_dtypes_are_other_variants(found: Any) -> None:
    functions = {name: found[name][3] for name in NAMES}
    assert functions["moved"] == functions["aligned again"] == functions["aligned"]
    assert len(set(functions.values())) == 4


def test_every_launch_reaches_the_driver_and_a_profiler(found: Any) -> None:
    assert found["launches"] == 4 * len(NAMES)
    assert found["told"] == 1
