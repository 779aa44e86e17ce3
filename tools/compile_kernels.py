"""Compile every Triton kernel ahead of time, without a GPU, and report registers and memory.

    tools/compile_kernels.py            compile, print the table, write the figures
    tools/compile_kernels.py --check    compile, and fail if a kernel uses more than recorded
    ... --check --if-changed            as above, if Triton or a kernel has changed since then

The compiled cases are the ``AOT_CASES`` in the modules of `baton_kernels.triton`. Types of
arguments are Triton's types; ``i32:16`` is an integer that is divisible by 16. Pointers are
divisible by 16, too, as torch allocates memory. The numbers of registers and spilled bytes are
reported by the ptxas in Triton's wheel. Pending groups is the number of copies to shared memory
that may still be under way while a loop with matrix products waits for the copies that it needs
next; with 0, it waits for all copies. Figures depend on Triton's release, so they are recorded and
compared for each release. To use a release that is not installed, set ``PYTHONPATH=FOLDER`` to a
folder with this release (`make kernels`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import pkgutil
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from baton_kernels.triton.aot import AotCase

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "kernels_aot.json"
PACKAGE = "baton_kernels.triton"
ARCHITECTURES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90}
# A patch release of Triton may allocate registers a little differently.
REGISTERS_SLACK = 8
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK = re.compile(r"(\d+) bytes stack frame")
_LABEL = re.compile(r"^\s*(\$L\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")
_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)\b")
_INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.]*")
_LAYOUT_NAME = re.compile(r"#(?:blocked|mma|linear)\d*\b")
_LAYOUT = re.compile(r"^(#(?:blocked|mma|linear)\d*) = (.*)$", re.MULTILINE)
# The end of an operation tt.reduce
_SUMMED = re.compile(r"^\s*\}\) : \((tensor<.*?>)\) ->", re.MULTILINE)
_WAIT = re.compile(r"\bcp\.async\.wait_group\s+(\d+);")

Figures = dict[str, int]
Found = dict[str, dict[str, Figures]]  # case -> architecture -> figures


def main() -> int:
    """Compile all cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with what is written")
    parser.add_argument("--if-changed", action="store_true", help="only if anything has changed")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file to compare with")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET: is 1, but the interpreter compiles nothing")
        return 2
    written = read_releases(arguments.record).get(release(), {})
    if arguments.if_changed and made_of().items() <= written.items():
        print(f"Triton {release()} and the kernels are those that were compiled for {RECORD.name}")
        return 0
    found = compile_all(arguments.only)
    Console(width=110).print(table_of(found))
    if arguments.check:
        recorded = written.get("kernels", {})
        findings = list(differences(found, recorded, complete=not arguments.only))
        for finding in findings:
            print(finding)
        return 1 if findings else 0
    write(found, complete=not arguments.only)
    return 0


def compile_all(only: str) -> Found:
    """Compile every case for every architecture, and return the figures."""
    jobs = [
        (module, case.name, architecture)
        for module in modules()
        for case in cases_of(module)
        if only in case.name
        for architecture, capability in ARCHITECTURES.items()
        if capability in case.capabilities
    ]
    found: Found = {}
    num_processes = len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(num_processes, initializer=_set_up, initargs=(cache,)) as processes,
    ):
        for (_, name, architecture), figures in zip(
            jobs, processes.map(_compile, *zip(*jobs, strict=True)), strict=True
        ):
            assert architecture not in found.setdefault(name, {}), f"{name}: two cases"
            found[name][architecture] = figures
    return found


def modules() -> list[str]:
    """List all modules of `PACKAGE` and of its subpackages."""
    package = import_module(PACKAGE)
    return sorted(module.name for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."))


def cases_of(module: str) -> tuple[AotCase, ...]:
    """Return a module's cases; empty if the module has no kernels."""
    cases: tuple[AotCase, ...] = getattr(import_module(module), "AOT_CASES", ())
    return cases


def _set_up(cache: str) -> None:
    """Use an empty cache: kernels in a cache are not compiled, and show no registers."""
    os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1")


def _compile(module: str, name: str, architecture: str) -> Figures:
    (case,) = (case for case in cases_of(module) if case.name == name)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        compiled = compile_case(case, ARCHITECTURES[architecture])
    log = said.getvalue()
    used, spilled, stack = _USED.search(log), _SPILLED.search(log), _STACK.search(log)
    if not (used and spilled and stack):
        raise RuntimeError(f"{name}: ptxas said nothing of what it used: {log!r}")
    pending = pending_groups(compiled.asm["ptx"])
    figures = {} if pending is None else {"pending_groups": pending}
    if not case.fuses_floats:
        figures["sum_order"] = sum_order(compiled.asm["ttgir"], compiled.asm["ptx"])
    return figures | {
        "registers": int(used[1]),
        "spill_bytes": int(spilled[1]) + int(spilled[2]),
        "stack_bytes": int(stack[1]),
        "shared_bytes": compiled.metadata.shared,
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
    }


def compile_case(case: AotCase, capability: int) -> Any:
    """Compile one case; return Triton's result, with ``asm["ptx"]`` and ``metadata``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(case.signature)
    aligned = [
        index
        for index, argument in enumerate(case.kernel.arg_names)
        if types[argument].startswith("*") or types[argument].endswith(":16")
    ]
    source = ASTSource(
        case.kernel,
        {argument: types[argument].removesuffix(":16") for argument in case.kernel.arg_names},
        dict(case.constants),
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": case.num_warps,
            "num_stages": case.num_stages,
            "enable_fp_fusion": case.fuses_floats,
        },
    )


def sum_order(ttgir: str, ptx: str) -> int:
    """Return a number for the order in which a kernel adds: equal numbers mean equal orders."""
    layouts = dict(_LAYOUT.findall(ttgir))
    tiles = set(_SUMMED.findall(ttgir))
    summed = sorted(_LAYOUT_NAME.sub(lambda name: layouts[name[0]], tile) for tile in tiles)
    return zlib.crc32(repr((summed, sorted(set(_INSTRUCTION.findall(ptx))))).encode())


def pending_groups(ptx: str) -> int | None:
    """Return the smallest number of pending groups when an innermost loop waits for copies.

    None if no loop waits for copies. Around the innermost loops, all copies have arrived.
    """
    loops = [loop for loop in innermost_loops(ptx) if _PRODUCT.search(loop)]
    return min((int(wait) for loop in loops for wait in _WAIT.findall(loop)), default=None)


def innermost_loops(ptx: str) -> Iterator[str]:
    """Yield the code of each loop that has no loop inside."""
    labels: dict[str, int] = {}
    last_branch = -1
    lines = ptx.splitlines()
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        elif (branch := _BRANCH.search(line)) and branch[1] in labels:
            first = labels[branch[1]]
            if first > last_branch:
                yield "\n".join(lines[first:number])
            last_branch = number


def differences(
    found: Found, recorded: Mapping[str, Mapping[str, Figures]], complete: bool
) -> Iterator[str]:
    """Yield a line for each figure that is worse than the recorded figure, or not recorded."""
    for name, architecture, figures in _rows(found):
        known = recorded.get(name, {}).get(architecture)
        if known is None:
            yield (
                f"{name} on {architecture}: is not in {RECORD.name} for Triton {release()}; "
                "run tools/compile_kernels.py"
            )
            continue
        for figure, slack in (
            ("spill_bytes", 0),
            ("registers", REGISTERS_SLACK),
            ("shared_bytes", 0),
        ):
            if figures[figure] > known[figure] + slack:
                yield (
                    f"{name} on {architecture}: {figure}: {known[figure]} are written, "
                    f"got {figures[figure]}"
                )
        pending, before = figures.get("pending_groups"), known.get("pending_groups")
        if (pending or 0) < (before or 0):
            yield f"{name} on {architecture}: pending_groups: {before} are written, got {pending}"
    for name in sorted(set(recorded) - set(found) if complete else ()):
        yield f"{name}: is in {RECORD.name}, but no module has this case"


def table_of(found: Found) -> Table:
    """Make a table of the figures, with one row per case and architecture."""
    columns = (
        "registers", "spill_bytes", "stack_bytes", "shared_bytes", "pending_groups", "num_warps",
        "num_stages",
    )  # fmt: skip
    table = Table("kernel", "for", *(column.replace("_", " ") for column in columns))
    for name, architecture, figures in _rows(found):
        table.add_row(name, architecture, *(str(figures.get(column, "")) for column in columns))
    return table


def _rows(found: Found) -> Iterator[tuple[str, str, Figures]]:
    for name, by_architecture in sorted(found.items()):
        for architecture, figures in by_architecture.items():
            yield name, architecture, figures


def release() -> str:
    """Return Triton's release, such as ``3.6``, by which figures are recorded."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def made_of() -> dict[str, str]:
    """Return the versions on which the figures depend: Triton's, and a digest of kernels' code."""
    import triton

    digest = hashlib.sha256()
    for path in sorted((ROOT / "kernels" / "baton_kernels" / "triton").rglob("*.py")):
        digest.update(code_of(path.read_text(encoding="utf-8")).encode())
    return {"triton": triton.__version__, "sources": digest.hexdigest()[:16]}


def code_of(source: str) -> str:
    """Return a module's code without its comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.unparse(tree)


def read_releases(record: Path) -> dict[str, Any]:
    """Read the recorded figures, by Triton release."""
    releases: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["releases"]
    return releases


def write(found: Found, complete: bool) -> None:
    """Record figures of this Triton release; keep those of other releases and other cases."""
    releases = read_releases(RECORD)
    known = {} if complete else releases.get(release(), {}).get("kernels", {})
    kernels = dict(sorted((known | found).items()))
    releases[release()] = {**made_of(), "kernels": kernels}
    document = {"releases": dict(sorted(releases.items()))}
    RECORD.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RECORD.relative_to(ROOT)} for Triton {release()}")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    sys.exit(main())
