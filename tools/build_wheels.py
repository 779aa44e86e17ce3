"""Builds Baton's wheels: one per machine type with native kernels, one for all other platforms.

    python -m tools.build_wheels TOOLS_BIN FOLDER

TOOLS_BIN is the folder of the programs `hatchling` and `auditwheel`; the wheels are written to
FOLDER. The native libraries are kept in build/wheel_libraries, and rebuilt when sources, compiler
or flags change. Cross compilers build libraries for other machine types (apt install
gcc-aarch64-linux-gnu). For each wheel, the script prints the wheel's size, the C library that the
wheel needs, and its native libraries. The exit code is 1 if a wheel is too large, or if its
libraries need a newer C library than the wheel's tag promises.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.kernel_library.ahead import build_libraries
from baton.kernel_library.compilers import BuildError
from tools.wheel_hook import FOLDER_VARIABLE, GLIBC

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ROOT / "build" / "wheel_libraries"
MACHINES = ("x86_64", "aarch64")
MOST_MB = 25


class WheelError(Exception):
    """Raised for a wheel that cannot be published; the message says why."""


def main(words: Sequence[str]) -> int:
    """Build all wheels; return the exit code."""
    if len(words) != 2:
        sys.stderr.write("usage: python -m tools.build_wheels TOOLS_BIN FOLDER\n")
        return 2
    tools, folder = (Path(word).absolute() for word in words)
    try:
        build_wheel(tools, folder)
        for machine in MACHINES:
            libraries = LIBRARIES / machine
            files = build_libraries(libraries, machine=machine)
            build_wheel(tools, folder, libraries)
            for file in files:
                print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.stem}")
    except (BuildError, WheelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def build_wheel(tools: Path, folder: Path, libraries: Path | None = None) -> Path:
    """Build a wheel that contains these native libraries; print its size, return its file.

    Raises:
        WheelError: the build or a check failed.
    """
    environment = {FOLDER_VARIABLE: str(libraries or "")}
    with tempfile.TemporaryDirectory() as work:
        target = ("--target", "wheel", "--directory", work)
        run([tools / "python", "-m", "hatchling", "build", *target], environment)
        (built,) = Path(work).glob("*.whl")
        needs = "" if libraries is None else f", needs {check_wheel(tools, built)}"
        print(f"{built.stat().st_size / 1e6:5.2f} MB  {built.name}{needs}")
        return Path(shutil.move(built, folder / built.name))


def check_wheel(tools: Path, wheel: Path) -> str:
    """Return the version of the C library that a wheel needs, such as "glibc 2.27".

    Raises WheelError if the wheel is too large, or needs a newer C library than its tag promises.
    """
    if wheel.stat().st_size > MOST_MB * 1e6:
        size = f"{wheel.stat().st_size / 1e6:.1f}"
        raise WheelError(f"{wheel.name}: must have {MOST_MB} MB or less, got {size}")
    # Each library is for CPUs with one instruction set, so instruction sets are not checked.
    shown = run([tools / "auditwheel", "show", "--disable-isa-ext-check", wheel])
    tags = re.search(r'platform tag: "manylinux_2_(\d+)_', " ".join(shown.split()))
    glibc = int(GLIBC.rpartition("_")[2])
    if tags is None or int(tags[1]) > glibc:
        raise WheelError(f"{wheel.name}: must run with {GLIBC}: {shown.strip()}")
    return f"glibc 2.{tags[1]}"


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    """Run a command in the checkout and return its output.

    Raises WheelError with the end of the command's output if the command fails.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WheelError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
