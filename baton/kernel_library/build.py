"""Build the library of native kernels from C sources, with the system's compiler, in a cache.

Each combination of sources, compiler, flags and CPU has a library of its own in the user's cache. A
lock on the cache folder (flock) lets one process build while others wait. Finished files are
renamed into place. Whoever can write such a file could run code in Baton's processes, so folder and
file must belong to this user, must not be writable for others, and are opened by descriptor. If the
cache is not writable, a folder for temporary files is used. Knows nothing of the functions in the
library.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from baton.checkpoint.cache_folder import CacheFolderError, cache_folder, is_own, open_own_folder
from baton.kernel_library.compilers import BuildError, Compilers, run_tool
from baton.processes.cores import usable_cores
from baton.processes.held_folder import HeldFolder

FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fvisibility=default", "-w",
)  # fmt: skip
# Flags by platform.machine(). On x86, GCC by default uses only half of the register width. Without
# -mtune, GCC orders instructions badly for CPUs that are newer than the compiler (docs/log.md,
# 2026-11-27).
_X86_FLAGS = ("-march=native", "-mtune=generic", "-mprefer-vector-width=512")
_ARM_FLAGS = ("-mcpu=native",)  # on Arm, clang knows -march=native only since release 16
_CPU_FLAGS = {
    "x86_64": _X86_FLAGS, "AMD64": _X86_FLAGS, "aarch64": _ARM_FLAGS, "arm64": _ARM_FLAGS
}  # fmt: skip
_CHOOSES_CPU = ("-march", "-mcpu")  # flags in ``CC`` that choose the CPU
THREADS = "-fopenmp"
_HAS_THREADS = sys.platform == "linux"  # team.c has the functions that GCC calls for `#pragma omp`
_TIME_LIMIT_S = 300.0  # seconds; two idle cores need about 40 s, busy machines more
_LOCK_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class OpenedLibrary:
    """An open library file that only this user can change.

    Attributes:
        descriptor: descriptor of the open file; the caller closes it.
        path: path of the file.
        problem: why the library is not in the user's cache; empty: the library is in the cache, or
            was built ahead.
        instruction_set: instruction set for which the library was built ahead; empty: it was built
            on this machine.
    """

    descriptor: int
    path: Path
    problem: str = ""
    instruction_set: str = ""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Sources and compiler of the library, and the resulting name of its file."""

    sources: Sequence[Path]
    compiler: Sequence[str]
    flags: Sequence[str]

    @property
    def name(self) -> str:
        return f"{_key(self.sources, self.compiler, self.flags)}.so"


def open_library(on_build: Callable[[], None] = lambda: None) -> OpenedLibrary:
    """Open the library for this machine; build the library first if there is none.

    The file belongs to this user or root, and nobody else can write the file or its folder. A file
    that others can write to is built again; a folder of another user is an error.

    ``CC`` in the environment chooses the compiler, and perhaps another instruction set than this
    CPU's: ``CC="gcc -march=x86-64-v3"``.

    Args:
        on_build: called before the compiler starts, because building takes a minute.

    Raises:
        BuildError: there are no sources, no compiler or no safe folder, or the compiler failed.
    """
    recipe = _recipe()

    @functools.cache
    def compile_once() -> bytes:
        on_build()
        return compile_library(recipe.sources, recipe.compiler, recipe.flags)

    problems: list[str] = []
    for place in (_cache_folder, _temporary_folder):
        try:
            folder = place()
            descriptor = _open_in(folder, recipe.name, compile_once)
        except _NotWritableError as error:
            problems.append(str(error))
        else:
            return OpenedLibrary(descriptor, folder / recipe.name, "; ".join(problems))
    raise BuildError("; ".join(problems))


def find_library() -> Path | None:
    """Return the library that :func:`open_library` would open; None if it must be built first.

    Raises:
        BuildError: the library cannot be built.
    """
    name = _recipe().name
    for place in (_cache_folder, _temporary_folder):
        with contextlib.suppress(OSError, CacheFolderError, _NotWritableError):
            folder = place()
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = _open_own(name, folder_fd) if is_own(os.fstat(folder_fd)) else None
            finally:
                os.close(folder_fd)
            if found is not None:
                os.close(found)
                return folder / name
    return None


class _NotWritableError(Exception):
    """A folder cannot be used for the library; the message says which folder and why."""


def _recipe() -> _Recipe:
    """Choose the sources, compiler and flags; raises BuildError."""
    sources, compiler = find_sources(), find_compiler()
    flags = [*FLAGS, THREADS if _HAS_THREADS else "-fopenmp-simd"]
    if not any(word.startswith(_CHOOSES_CPU) for word in compiler):
        flags += _CPU_FLAGS.get(platform.machine(), ())
    return _Recipe(sources, compiler, flags)


def _cache_folder() -> Path:
    """Return the folder for the library in the user's cache."""
    try:
        return cache_folder("native")
    except CacheFolderError as error:  # the user has no home folder
        raise _NotWritableError(str(error)) from error


def _temporary_folder() -> Path:
    """Return this user's temporary folder for the library, used if the cache is not writable."""
    try:
        return Path(tempfile.gettempdir()) / f"baton-native-{os.geteuid()}"
    except OSError as error:
        raise _NotWritableError("no folder for temporary files can be written") from error


def _open_in(folder: Path, name: str, make: Callable[[], bytes]) -> int:
    """Open a library in a folder and return its descriptor; build the library if it is missing.

    Raises:
        BuildError: the folder belongs to another user, or ``make`` failed.
        _NotWritableError: the folder cannot be made or written.
    """
    try:
        folder_fd = open_own_folder(folder)
    except CacheFolderError as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        raise _NotWritableError(f"{folder}: {error.strerror or error}") from error
    try:
        library = _open_own(name, folder_fd)
        if library is None:
            with _locked(folder_fd):
                # Another process may have built the library in the meantime.
                library = _open_own(name, folder_fd)
                if library is None:
                    _check_writable(folder_fd)  # checked before building, which takes a minute
                    _store(make(), name, folder_fd)
                    library = _open_own(name, folder_fd)
    except OSError as error:
        raise _NotWritableError(f"{folder}: {error.strerror or error}") from error
    finally:
        os.close(folder_fd)
    if library is None:
        raise BuildError(f"{folder / name}: somebody else keeps changing it")
    return library


@contextlib.contextmanager
def _locked(folder_fd: int) -> Iterator[None]:
    """Hold the folder's lock, so that one process builds while others wait for the library.

    Goes on without the lock if the file system has no locks, or if the time limit of a build has
    passed: two builds at the same time are slow, but do no harm.
    """
    give_up_at = time.monotonic() + _TIME_LIMIT_S
    while time.monotonic() < give_up_at:
        try:
            fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_LOCK_POLL_S)
        except OSError:
            break
    yield  # closing the descriptor releases the lock


def _check_writable(folder_fd: int) -> None:
    """Raise OSError if no file can be created in the folder."""
    name = f".{secrets.token_hex(8)}"
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600, dir_fd=folder_fd))
    os.unlink(name, dir_fd=folder_fd)


def _open_own(name: str, folder_fd: int) -> int | None:
    """Open a file; return its descriptor, or None if other users than root can write to it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder_fd)
    except OSError:  # missing, or a symbolic link
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and is_own(found) and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    return None


def _store(content: bytes, name: str, folder_fd: int) -> None:
    """Write a file under a temporary name, then rename it, so that nobody reads half a file."""
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
    """Return the C sources, in the installed package or beside it in the repository.

    Raises BuildError.
    """
    found = importlib.util.find_spec("baton_kernels")  # does not import the package or torch
    if found is None or found.origin is None:
        raise BuildError("the package baton_kernels is not installed")
    package = Path(found.origin).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        sources = sorted(path for path in folder.glob("*") if path.suffix in (".c", ".h"))
        if sources:
            return sources
    raise BuildError(f"no C sources beside {package}")


def find_compiler() -> list[str]:
    """Return the command of a compiler that can build the library; raises BuildError."""
    wanted, unfit = os.environ.get("CC"), ""
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        words = name.split()
        path = shutil.which(words[0]) if words else None
        if path is None:
            continue
        if _HAS_THREADS and "clang" in _version([path, *words[1:]]):
            unfit = f"{path}: clang calls other functions for threads than GCC; install gcc"
            continue
        return [path, *words[1:]]
    raise BuildError(unfit or f"no C compiler ({f'CC={wanted}' if wanted else 'cc, gcc, clang'})")


def chooses_cpu() -> bool:
    """Return whether ``CC`` chooses the CPU to compile for (``-march`` or ``-mcpu``)."""
    return any(word.startswith(_CHOOSES_CPU) for word in os.environ.get("CC", "").split())


def digest_of_sources(sources: Sequence[Path]) -> str:
    """Return a digest of the sources' names and contents."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _version(compiler: Sequence[str]) -> str:
    return run_tool([*compiler, "--version"])


def _key(sources: Sequence[Path], compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in (*compiler, _version(compiler), *flags, platform.machine(), _cpu_flags()):
        digest.update(text.encode() + b"\0")
    digest.update(digest_of_sources(sources).encode())
    return digest.hexdigest()[:32]


def _cpu_flags() -> str:
    """Return the lines of /proc/cpuinfo that tell which instructions a compiler may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def compile_library(
    sources: Sequence[Path],
    compiler: Sequence[str],
    flags: Sequence[str],
    time_limit_s: float = _TIME_LIMIT_S,
) -> bytes:
    """Compile the library on all cores and return its content; raises BuildError."""
    deadline = time.monotonic() + time_limit_s
    try:
        held = HeldFolder("baton-build-")
    except OSError as error:
        raise BuildError(f"no folder for temporary files: {error.strerror or error}") from error
    with (
        held,
        ThreadPoolExecutor(len(usable_cores())) as at_once,
        # The compilers are ended before the threads, which wait for the compilers' processes.
        Compilers(deadline) as compilers,
    ):
        largest_first = sorted(sources, key=lambda one: -one.stat().st_size)
        objects = {f"{held.path}/{one.stem}.o": one for one in largest_first if one.suffix == ".c"}
        commands = (
            [*compiler, *flags, "-c", str(source), "-o", name] for name, source in objects.items()
        )
        for _ in at_once.map(compilers.run, commands):
            pass
        # The library is linked without -fopenmp, which would add a second OpenMP runtime beside
        # team.c. With -z,defs a missing function is an error of the linker; otherwise the library
        # might use a function of torch's libgomp that team.c lacks.
        finished = f"{held.path}/library.so"
        complete = ["-fno-openmp", "-Wl,-z,defs"] if _HAS_THREADS else []
        inputs = [*sorted(objects), "-lpthread", "-lm"]
        compilers.run([*compiler, "-shared", *complete, "-o", finished, *inputs])
        return Path(finished).read_bytes()
