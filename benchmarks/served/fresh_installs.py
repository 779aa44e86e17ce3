"""Install Baton's wheel in fresh Debian systems without a compiler, and ask one question.

    python -m benchmarks fresh_installs --wheels dist --torch-wheels FOLDER [--only NAME] [--save]

Each system is a folder with Debian's files, which mmdebstrap makes. The quickstart's commands
install the wheel and its requirements there. `baton up` then runs in namespaces of its own: no
network but loopback, no other processes. Needs root, `apt install mmdebstrap qemu-user-static`, and
uv's programs in PATH. The benchmark measures seconds and bytes on disk. The seconds are only a
rough guide, because other programs may run on the machine. Each system is removed after its run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Run
from benchmarks.served.installs.installation import Installation
from benchmarks.served.installs.systems import CPU_BUILD, DEBIAN, SYSTEMS, System

PAGE = ROOT / "docs" / "releases.md"
BEGIN, END = "<!-- written by benchmarks/served/fresh_installs.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which wheels to install in which systems.

    Attributes:
        wheels: folder of Baton's wheels.
        torch_wheels: folder of torch's wheels for CPUs, which `torch_index.py` serves in place of
            PyTorch's index.
        python: Python interpreters to copy into systems, as 3.12=FOLDER.
        only: names of the systems to measure; empty: all.
        folder: folder for systems and uv's cache, which keeps both; None: a temporary folder.
    """

    wheels: Path = ROOT / "dist"
    torch_wheels: Path | None = None
    python: Sequence[str] = ()
    only: Sequence[str] = ()
    folder: Path | None = None


def run(run: Run, options: Options) -> None:
    """Install in all chosen systems; save each system's results, and write docs/releases.md."""
    pythons = {name: Path(folder) for name, folder in (one.split("=", 1) for one in options.python)}
    rows: dict[str, object] = {}
    for system in SYSTEMS:
        if options.only and system.name not in options.only:
            continue
        if missing := what_is_missing(system, options, pythons):
            print(f"{system.name}: not measured: {missing}")
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            try:
                row = Installation(
                    system,
                    Path(work),
                    wheels=options.wheels,
                    torch_wheels=options.torch_wheels,
                    python=pythons[system.python] if system.is_copied else None,
                    kept=options.folder,
                ).measure()
            except (subprocess.SubprocessError, FileNotFoundError) as error:
                output = getattr(error, "stderr", None) or error
                row = {"failed": str(output).strip().splitlines()[-1][-300:]}
        # The file of results keeps the rows of other systems.
        row["measured"] = {name: run.environment[name] for name in ("date", "git_revision", "cpu")}
        rows[system.name] = row
        print(f"{system.name}: {json.dumps(row)}", flush=True)
        systems = run.saved().get("systems", {}) | rows
        known = {one.name: systems[one.name] for one in SYSTEMS if one.name in systems}
        run.save({"wheels": sizes(options.wheels), "systems": known})
    if run.saves:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        tables = f"{wheels_table(run.saved()['wheels'])}\n{table(run.saved()['systems'])}"
        PAGE.write_text(f"{before}{BEGIN}\n{tables}{END}{rest.partition(END)[2]}", "utf-8")


def what_is_missing(system: System, given: Options, pythons: Mapping[str, Path]) -> str:
    """Return which option a system needs but has not got; empty: none."""
    if system.torch == CPU_BUILD and given.torch_wheels is None:
        return "needs --torch-wheels"
    if system.is_copied and system.python not in pythons:
        return f"needs --python {system.python}=FOLDER"
    return ""


def sizes(wheels: Path) -> dict[str, object]:
    """Return the size of each wheel and of each library in it, in MB."""
    found: dict[str, object] = {}
    for wheel in sorted(wheels.glob("baton_serve-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            libraries = [one for one in archive.infolist() if one.filename.endswith(".so")]
        found[wheel.name] = {
            "mb": round(wheel.stat().st_size / 1e6, 2),
            "libraries_mb": {
                Path(one.filename).stem: round(one.file_size / 1e6, 2) for one in libraries
            },
        }
    return found


def wheels_table(wheels: Mapping[str, Any]) -> str:
    """Return the sizes of wheels and libraries as a table in Markdown."""
    lines = ["| wheel | MB | its libraries, MB |", "|---|---|---|"]
    for name, wheel in wheels.items():
        tag = name.removesuffix(".whl").rpartition("-")[2]
        libraries = (f"`{library}` {mb:.2f}" for library, mb in wheel["libraries_mb"].items())
        lines.append(f"| `{tag}` | {wheel['mb']:.1f} | {', '.join(libraries) or 'none'} |")
    return "\n".join(lines) + "\n"


def table(systems: Mapping[str, Any]) -> str:
    """Return the systems' results as a table in Markdown."""
    lines = [
        "| system | Python | installed by | torch | install, s | installed, MB | ready, s"
        " | answer, s | memory, MiB | kernels |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for system in SYSTEMS:
        if (row := systems.get(system.name)) is None:
            continue
        shown = [f"Debian {DEBIAN[system.suite]}, {system.machine}", system.python, system.tool]
        if "failed" in row:
            lines.append(f"| {' | '.join(shown)} | failed: {row['failed']} | | | | | | |")
            continue
        kernels = row["kernels"][0].removeprefix("built ahead for ").partition(",")[0]
        columns = ("install_s", "installed_mb", "ready_s", "answered_s", "memory_mib")
        cells = [*shown, row["torch"], *(f"{row[name]:,}" for name in columns), kernels]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
