"""From C sources to a shared library in the user's cache, by the system's compiler.

One library per source, compiler, flags and CPU. Several processes may build at once: each builds
in a folder of its own, and the finished file is renamed into place.
Refuses to know: what the functions in it do.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-fvisibility=default", "-w",
)  # fmt: skip
# GCC would use half of the registers' width otherwise.
_X86_FLAGS = ("-mprefer-vector-width=512",)
_TIME_LIMIT_S = 120.0


class BuildError(Exception):
    """There is no library; the message is one line that says why."""


def cached_library(*, openmp: bool) -> Path:
    """The library for this machine, built if it is not there yet.

    Args:
        openmp: whether the process has an OpenMP runtime that the library can use.

    Raises:
        BuildError: no sources, no compiler, or it failed.
    """
    sources, compiler = _sources(), _compiler()
    flags = [*_FLAGS, "-fopenmp" if openmp else "-fopenmp-simd"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags += _X86_FLAGS
    folder = Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton") / "native"
    library = folder / f"{_key(sources, compiler, flags)}.so"
    if not library.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build(sources, [*compiler, *flags], library)
        except OSError as error:
            raise BuildError(f"{folder}: {error.strerror or error}") from error
    return library


def _sources() -> list[Path]:
    """Inside the package when installed, beside it in the repository."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        sources = sorted(path for path in folder.glob("*") if path.suffix in (".c", ".h"))
        if sources:
            return sources
    raise BuildError(f"no C sources beside {_PACKAGE}")


def _compiler() -> list[str]:
    wanted = os.environ.get("CC")
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        words = name.split()
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    raise BuildError(f"no C compiler ({f'CC={wanted}' if wanted else 'cc, gcc, clang'})")


def _key(sources: Sequence[Path], compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    version = _run([*compiler, "--version"], time.monotonic() + _TIME_LIMIT_S)
    for text in (*compiler, version, *flags, platform.machine(), _cpu_flags()):
        digest.update(text.encode() + b"\0")
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _cpu_flags() -> str:
    """What -march=native looks at."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _build(sources: Sequence[Path], compile_command: Sequence[str], library: Path) -> None:
    deadline = time.monotonic() + _TIME_LIMIT_S
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        objects = []
        for source in sources:
            if source.suffix == ".c":
                objects.append(f"{folder}/{source.stem}.o")
                _run([*compile_command, "-c", str(source), "-o", objects[-1]], deadline)
        # Without -fopenmp: the runtime is torch's own, which the process has loaded already.
        finished = f"{folder}/{library.name}"
        _run([compile_command[0], "-shared", "-o", finished, *objects, "-lm"], deadline)
        Path(finished).replace(library)


def _run(command: Sequence[str], deadline: float) -> str:
    """Standard output; raises BuildError with the first line of what went wrong."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(0.1, deadline - time.monotonic())
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]}: not done after {_TIME_LIMIT_S:g} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror or error}") from error
    if done.returncode:
        lines = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        shown = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]}: {shown}")
    return done.stdout
