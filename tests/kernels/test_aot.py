"""Every kernel compiles ahead of time for real GPUs, and takes no more of one than is recorded."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from baton_kernels.triton.attention_tile import PagedShape
from baton_kernels.triton.tile_sizes import shared_kib, varlen_tile
from tools.compile_kernels import cases_of, code_of, innermost_loops, modules, pending_groups

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "compile_kernels.py"
RECORD = ROOT / "benchmarks" / "results" / "kernels_aot.json"
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}  # that a program may have


def run_tool(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path} if path else {}
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", ["", ".venv-triton"])
def test_kernels_take_no_more_registers_spills_and_shared_memory_than_recorded(
    folder: str,
) -> None:
    if not (ROOT / folder).is_dir():
        pytest.skip("make kernels has not fetched the other release of Triton")
    path = str(ROOT / folder) if folder else ""
    done = run_tool("--check", "--if-changed", path=path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_kernels_say_of_themselves_is_no_change_and_a_number_is_one() -> None:
    kernel = '@triton.jit\ndef f(x):\n    """Double it."""\n    tl.store(x, 2)  # both\n'
    assert code_of(kernel) == code_of("@triton.jit\ndef f(x):\n    tl.store(x, 2)\n")
    assert code_of(kernel) != code_of(kernel.replace("2)", "3)"))


def recorded_releases() -> dict[str, Any]:
    releases: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["releases"]
    return releases


def test_the_oldest_release_of_triton_and_the_installed_one_are_recorded() -> None:
    assert {"3.6", ".".join(version("triton").split(".")[:2])} <= set(recorded_releases())
    first, *others = (set(found["kernels"]) for found in recorded_releases().values())
    assert all(kernels == first for kernels in others)


@pytest.mark.parametrize("release", recorded_releases())
def test_what_is_recorded_does_not_spill_where_it_should_be_fast(release: str) -> None:
    kernels = recorded_releases()[release]["kernels"]
    assert len(kernels) > 10
    hopper = {name: found["sm_90"] for name, found in kernels.items() if "sm_90" in found}
    assert len(hopper) > 10
    assert [name for name, found in hopper.items() if found["spill_bytes"]] == []


@pytest.mark.parametrize("release", recorded_releases())
def test_prompts_wait_for_one_tile_while_the_next_is_on_its_way(release: str) -> None:
    """Groups of copies: keys, values and a piece of the block table are one tile's."""
    found = [
        (name, architecture, figures["pending_groups"])
        for name, by_architecture in recorded_releases()[release]["kernels"].items()
        for architecture, figures in by_architecture.items()
        # float32 has its own short pipeline, and 99 KiB hold one tile of 256 dimensions.
        if name.startswith("varlen_attention") and "fp32" not in name
        if not ("d256" in name and "99 KiB" in name)
    ]
    assert len({name for name, _, _ in found}) > 15
    assert {architecture for _, architecture, _ in found} == set(SHARED_KIB)
    assert [case for case in found if case[2] < 3] == []


@pytest.mark.parametrize("release", recorded_releases())
def test_no_kernel_wants_more_shared_memory_than_there_is(release: str) -> None:
    too_large = [
        (name, architecture, figures["shared_bytes"])
        for name, by_architecture in recorded_releases()[release]["kernels"].items()
        for architecture, figures in by_architecture.items()
        if figures["shared_bytes"] > SHARED_KIB[architecture] * 1024
    ]
    assert too_large == []


@pytest.mark.parametrize("release", recorded_releases())
def test_what_is_recorded_is_cut_as_the_kernels_are_now(release: str) -> None:
    recorded = {
        (name, architecture): (figures["num_warps"], figures["num_stages"])
        for name, by_architecture in recorded_releases()[release]["kernels"].items()
        for architecture, figures in by_architecture.items()
    }
    assert recorded == {
        (case.name, f"sm_{capability}"): (case.num_warps, case.num_stages)
        for module in modules()
        for case in cases_of(module)
        for capability in case.capabilities
    }


def test_a_device_with_less_shared_memory_gets_a_shorter_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = PagedShape(num_kv_heads=8, group=4, head_dim=256, block_size=16)
    for index, capability, kib, stages in (
        (0, (8, 0), 163, 5), (1, (8, 6), 99, 3), (2, (8, 9), 99, 3), (3, (9, 0), 227, 5),
        (4, (12, 0), 99, 3), (5, (13, 7), 99, 3),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        shared_kib.cache_clear()
        has = shared_kib(torch.device("cuda", index))
        assert (has, varlen_tile(shape, 2, has).num_stages) == (kib, stages)
    shared_kib.cache_clear()


LOOP = """
$L__BB0_3:
    cp.async.wait_group {waits};
    bar.sync 0;
    {product}
    @%p1 bra $L__BB0_3;
    cp.async.wait_group 0;
"""


def test_pending_groups_are_those_of_loops_with_products() -> None:
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r1}};"
    copying = LOOP.format(waits=0, product="add.f32 %f1, %f1, %f2;")
    assert pending_groups(copying) is None
    hopper = LOOP.format(waits=2, product="wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 ..")
    assert pending_groups(copying + hopper.replace("BB0_3", "BB0_4")) == 2
    old = LOOP.format(waits=1, product=product)
    assert pending_groups(hopper + old.replace("BB0_3", "BB0_5")) == 1
    outer = "$L__BB0_2:\n" + hopper + "    @%p2 bra $L__BB0_2;\n"
    assert pending_groups(outer) == 2, "between two loops all copies have to arrive"


PRINT_PTX = """
import sys
from importlib import import_module
from tools.compile_kernels import compile_case
module = import_module("baton_kernels.triton." + sys.argv[1])
print(compile_case(module.AOT_CASES[0], 90).asm["ptx"])
"""


def ptx_of(code: str, *words: str) -> str:
    """Return what a program prints that compiles kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = (environment.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "kernels"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("release", recorded_releases())
def test_kernels_whose_results_have_no_company_add_in_one_order(release: str) -> None:
    """Decodes and prompts, few tokens and many: as they are compiled."""
    orders: dict[tuple[str, str], set[int]] = {}
    for name, found in recorded_releases()[release]["kernels"].items():
        for architecture, figures in found.items():
            if "sum_order" in figures:
                alike = re.sub(r" (decode|prompt|parts|few|many)\b", "", name)
                orders.setdefault((alike, architecture), set()).add(figures["sum_order"])
    assert len(orders) > 20
    assert [alike for alike, found in orders.items() if len(found) > 1] == []


@pytest.mark.parametrize("module", ["decode_attention", "invariant.attention", "invariant.linear"])
def test_parts_are_written_before_they_are_counted_and_read_after(module: str) -> None:
    """By all threads of a program, of which one counts."""
    ptx = ptx_of(PRINT_PTX, module)
    of_memory = re.compile(
        r"st\.global|bar\.sync|atom\.global\.gpu\.acq_rel\.add|ld\.global\.cg|\batom|\bred\."
    )
    found = [key for key, _ in itertools.groupby(of_memory.findall(ptx))]
    count = found.index("atom.global.gpu.acq_rel.add")
    assert found[count - 2 : count] == ["st.global", "bar.sync"]
    assert found[count + 1] == "bar.sync"
    assert "ld.global.cg" not in found[:count]
    assert "ld.global.cg" in found[count:]
    assert len([key for key in found if key.startswith(("atom", "red"))]) == 1


PRINT_SUMS = """
from baton_kernels.triton.ranks.collectives import AOT_CASES
from tools.compile_kernels import compile_case
for case in AOT_CASES:
    if "2 ranks, bf16" in case.name and "odd" not in case.name:
        print("====", compile_case(case, 90).asm["ptx"])
"""


def test_ranks_write_before_they_meet_and_read_after() -> None:
    """A rank's threads all write before its flags are released, and read after all acquires."""
    of_memory = re.compile(
        r"st\.global|bar\.sync|ld\.global\.cg|\batom\.global\.sys\.\w+\.\w+|\batom|\bred\."
    )
    release, acquire = "atom.global.sys.release.exch", "atom.global.sys.acquire.add"
    # A waiting program may store that it gives up.
    meeting = ["bar.sync", release, "bar.sync", acquire, "bar.sync", "st.global", "bar.sync"]
    one_pass = ["st.global", *meeting, "ld.global.cg", "st.global"]
    two_passes = [*one_pass, *meeting, *["ld.global.cg", "st.global"] * 2]
    printed = ptx_of(PRINT_SUMS).split("====")[1:]
    found = [[key for key, _ in itertools.groupby(of_memory.findall(ptx))] for ptx in printed]
    assert found == [one_pass, two_passes]


PRINT_MERGING = """
from baton_kernels.triton.decode_attention import AOT_CASES
from tools.compile_kernels import compile_case
(case,) = (case for case in AOT_CASES if case.name == "decode_attention d128 h16/8 bf16")
print(compile_case(case, 90).asm["ptx"])
"""


@pytest.mark.large
def test_threads_that_merge_parts_wait_for_no_other_thread() -> None:
    """Regression: threads exchanged each part's numbers, and a merge took 80 us on an H200."""
    loops = [loop for loop in innermost_loops(ptx_of(PRINT_MERGING)) if "ld.global.cg" in loop]
    merging = max(loops, key=lambda loop: loop.count("ld.global.cg"))
    assert merging.count("ld.global.cg") >= 16, "weights and numbers of eight parts"
    assert "bar.sync" not in merging


PRINT_DEPENDENT = """
from tools.compile_kernels import cases_of, compile_case, modules
for module in modules():
    for case in cases_of(module):
        if case.name.endswith(" dependent"):
            print("====", case.name)
            print(compile_case(case, 90).asm["ptx"])
"""


@pytest.mark.large
def test_dependent_kernels_wait_before_they_touch_memory() -> None:
    """Only the wait orders a dependent launch after the kernel before it."""
    of_memory = re.compile(
        r"griddepcontrol\.\w+|ld\.global|st\.global|cp\.async\.c|\batom\b|\bred\b|\bbra\b"
    )
    printed = ptx_of(PRINT_DEPENDENT)
    names, found = zip(
        *((text.split("\n")[0], of_memory.findall(text)) for text in printed.split("==== ")[1:]),
        strict=True,
    )
    assert len(names) == 4, names
    for name, order in zip(names, found, strict=True):
        assert order[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"], name
        assert len(order) > 3, f"{name}: no memory is touched"


def test_check_finds_a_kernel_that_got_worse(tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    release = ".".join(version("triton").split(".")[:2])
    kernel = recorded["releases"][release]["kernels"]["silu_mul bf16"]
    kernel["sm_80"]["registers"] -= 20
    del kernel["sm_90"]
    worse = tmp_path / "kernels_aot.json"
    worse.write_text(json.dumps(recorded), encoding="utf-8")
    done = run_tool("--check", "--only", "silu_mul", "--record", str(worse))
    assert done.returncode == 1, done.stderr
    assert "silu_mul bf16 on sm_80: registers: " in done.stdout
    assert "silu_mul bf16 on sm_90: is not in " in done.stdout


def test_the_interpreter_is_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(TOOL)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.startswith("error: TRITON_INTERPRET:")) == (2, True)
