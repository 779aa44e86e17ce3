"""From C sources to a shared library in the user's cache, by the system's compiler.

One library per source, compiler, flags and CPU. Several processes may build at once: each builds
in a folder of its own, and the finished file is renamed into place. Whoever could put a file there
could run code here: so folder and file must be ours alone, and are looked at by descriptor.
Refuses to know: what the functions in it do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.checkpoint.cache_folder import CacheFolderError, cache_folder, is_own, open_own_folder

_PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fvisibility=default", "-w",
)  # fmt: skip
# By platform.machine(). GCC would use half of the registers' width of an x86 otherwise, and would
# order instructions for what it takes a CPU for that is newer than itself (log, 2026-11-27).
_X86_FLAGS = ("-march=native", "-mtune=generic", "-mprefer-vector-width=512")
_ARM_FLAGS = ("-mcpu=native",)  # clang has learned -march=native there in release 16
_CPU_FLAGS = {
    "x86_64": _X86_FLAGS, "AMD64": _X86_FLAGS, "aarch64": _ARM_FLAGS, "arm64": _ARM_FLAGS
}  # fmt: skip
_CHOOSES_CPU = ("-march", "-mcpu")  # in CC: the user knows better
_TIME_LIMIT_S = 300.0  # on a busy machine; some 10 s of it are needed


class BuildError(Exception):
    """The library cannot be had; the message is one line that says why."""


def open_library(openmp_runtime: str | None) -> tuple[int, Path]:
    """Open the library for this machine, built if need be; return file and path.

    What is opened is a file of ours (or of root) that nobody else can write, in such a folder. A
    file that is not is built anew; a folder that is not is an error.

    ``CC`` in the environment names the compiler, and may choose another instruction set than that
    of this CPU: ``CC="gcc -march=x86-64-v3"``.

    Args:
        openmp_runtime: file of the OpenMP runtime that the library can use; None: there is none.

    Raises:
        BuildError: no sources, no compiler, no safe place for the library, or the compiler failed.
    """
    sources, compiler = find_sources(), find_compiler(openmp_runtime)
    flags = [*FLAGS, "-fopenmp-simd" if openmp_runtime is None else "-fopenmp"]
    if not any(word.startswith(_CHOOSES_CPU) for word in compiler):
        flags += _CPU_FLAGS.get(platform.machine(), ())
    name = f"{_key(sources, compiler, flags)}.so"
    try:
        folder = cache_folder("native")
    except CacheFolderError as error:
        raise BuildError(str(error)) from error
    try:
        folder_fd = open_own_folder(folder)
        try:
            library = _open_own(name, folder_fd)
            if library is None:
                _store(compile_library(sources, compiler, flags), name, folder_fd)
                library = _open_own(name, folder_fd)
        finally:
            os.close(folder_fd)
    except CacheFolderError as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror or error}") from error
    if library is None:
        raise BuildError(f"{folder / name}: somebody else changes it")
    return library, folder / name


def _open_own(name: str, folder_fd: int) -> int | None:
    """Open a file and return its descriptor; None unless it is ours alone."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder_fd)
    except OSError:  # not there, or a link
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and is_own(found) and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    return None


def _store(content: bytes, name: str, folder_fd: int) -> None:
    """Write a file and rename it into place."""
    new = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(new, flags, mode=0o600, dir_fd=folder_fd)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder_fd)
        raise


def find_sources() -> list[Path]:
    """Find the C files: inside the package when installed, beside it in the repository.

    Raises BuildError.
    """
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        sources = sorted(path for path in folder.glob("*") if path.suffix in (".c", ".h"))
        if sources:
            return sources
    raise BuildError(f"no C sources beside {_PACKAGE}")


def find_compiler(openmp_runtime: str | None) -> list[str]:
    """Find the first compiler whose code runs on the OpenMP runtime; return its words."""
    wanted, unfit = os.environ.get("CC"), ""
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        words = name.split()
        path = shutil.which(words[0]) if words else None
        if path is None:
            continue
        # GCC's code runs on LLVM's runtime and Intel's too, clang's on these alone.
        if (
            openmp_runtime
            and "libgomp" in openmp_runtime
            and "clang" in _version([path, *words[1:]])
        ):
            unfit = f"{path}: clang's OpenMP does not run on torch's {Path(openmp_runtime).name}"
            continue
        return [path, *words[1:]]
    raise BuildError(unfit or f"no C compiler ({f'CC={wanted}' if wanted else 'cc, gcc, clang'})")


def digest_of_sources(sources: Sequence[Path]) -> str:
    """Name the sources by what is in them."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _version(compiler: Sequence[str]) -> str:
    return _run([*compiler, "--version"], time.monotonic() + _TIME_LIMIT_S)


def _key(sources: Sequence[Path], compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in (*compiler, _version(compiler), *flags, platform.machine(), _cpu_flags()):
        digest.update(text.encode() + b"\0")
    digest.update(digest_of_sources(sources).encode())
    return digest.hexdigest()[:32]


def _cpu_flags() -> str:
    """Read the CPU's features, by which the compiler chooses instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def compile_library(
    sources: Sequence[Path], compiler: Sequence[str], flags: Sequence[str]
) -> bytes:
    """Compile the library and return its content."""
    deadline = time.monotonic() + _TIME_LIMIT_S
    with tempfile.TemporaryDirectory(prefix="baton-build-") as folder:
        objects = {f"{folder}/{one.stem}.o": one for one in sources if one.suffix == ".c"}
        with ThreadPoolExecutor() as at_once:
            commands = (
                [*compiler, *flags, "-c", str(source), "-o", name]
                for name, source in objects.items()
            )
            for _ in at_once.map(lambda command: _run(command, deadline), commands):
                pass
        # Without -fopenmp: the runtime is torch's own, which the process has loaded already.
        finished = f"{folder}/library.so"
        _run([*compiler, "-shared", "-o", finished, *objects, "-lm"], deadline)
        return Path(finished).read_bytes()


def _run(command: Sequence[str], deadline: float) -> str:
    """Run a command and return its output; raises BuildError with the first line of the problem."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
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
