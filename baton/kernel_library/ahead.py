"""Builds the library ahead of time for several instruction sets, and picks the best for a CPU.

For machines without a compiler: ``python -m baton_kernels.native.build_ahead FOLDER`` builds, and a
process loads from the folder in ``BATON_NATIVE_LIBRARIES``. Whoever can write there could run code
in our process, so folder and files must belong to this user or root, and be writable by nobody
else.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.checkpoint.cache_folder import is_own
from baton.kernel_library import build
from baton.kernel_library.compilers import BuildError

FOLDER_VARIABLE = "BATON_NATIVE_LIBRARIES"
_INDEX = "libraries.json"
_X86_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_X86_V4 = (*_X86_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# Beginnings of the features' line in /proc/cpuinfo: x86, Arm.
_FEATURES = ("flags\t", "flags ", "Features")
_WIDE = "-mprefer-vector-width=512"  # GCC's default uses only half of the register width


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set to compile the library for.

    Attributes:
        name: name of the library's file.
        machine: machine type, as `platform.machine` names it.
        flags: compiler flags.
        needs: features that the CPU must have, as /proc/cpuinfo names them.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


_DOTS = ("-march=x86-64-v4", "-mavx512vnni", _WIDE)
# Best first: a CPU loads the first one whose needs it meets.
INSTRUCTION_SETS = (
    InstructionSet(
        "x86-64-v4-amx",
        "x86_64",
        (*_DOTS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        (*_X86_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    InstructionSet(
        "x86-64-v4-bf16",
        "x86_64",
        (*_DOTS, "-mavx512bf16"),
        (*_X86_V4, "avx512_vnni", "avx512_bf16"),
    ),
    InstructionSet("x86-64-v4-vnni", "x86_64", _DOTS, (*_X86_V4, "avx512_vnni")),
    InstructionSet("x86-64-v4", "x86_64", ("-march=x86-64-v4", _WIDE), _X86_V4),
    InstructionSet(
        "x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), (*_X86_V3, "avx_vnni")
    ),
    InstructionSet("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _X86_V3),
    InstructionSet("x86-64", "x86_64", ("-march=x86-64",), ()),
    InstructionSet(
        "armv8.6-a", "aarch64", ("-march=armv8.6-a+i8mm",), ("asimdhp", "asimddp", "i8mm", "bf16")
    ),
    InstructionSet(
        "armv8.2-a", "aarch64", ("-march=armv8.2-a+dotprod+fp16",), ("asimdhp", "asimddp")
    ),
    InstructionSet("armv8-a", "aarch64", ("-march=armv8-a",), ()),
)


def build_libraries(folder: Path, sets: Iterable[InstructionSet] | None = None) -> list[Path]:
    """Build the library for each instruction set of this machine type; return the files.

    The libraries use torch's OpenMP runtime. ``CC`` names the compiler.

    Raises:
        BuildError: there are no sources or no compiler, or the compiler failed.
        OSError: the folder cannot be written.
    """
    wanted = [one for one in sets or INSTRUCTION_SETS if one.machine == platform.machine()]
    if not wanted:
        raise BuildError(f"no instruction sets are known of {platform.machine()}")
    sources, compiler = build.find_sources(), build.find_compiler("libgomp")
    folder.mkdir(parents=True, exist_ok=True)
    files, index = [], []
    for one in wanted:
        content = build.compile_library(sources, compiler, [*build.FLAGS, "-fopenmp", *one.flags])
        file = folder / f"{one.name}.so"
        file.write_bytes(content)
        file.chmod(0o644)
        files.append(file)
        index.append(
            {"name": one.name, "machine": one.machine, "needs": one.needs,
             "sha256": hashlib.sha256(content).hexdigest()}
        )  # fmt: skip
    text = json.dumps({"sources": build.digest_of_sources(sources), "libraries": index}, indent=1)
    (folder / _INDEX).write_text(text + "\n", encoding="utf-8")
    return files


def open_library_built_ahead(openmp_runtime: str | None) -> tuple[int, Path] | None:
    """Open the best library in the folder for this CPU; None: no folder is named.

    Args:
        openmp_runtime: file of the OpenMP runtime that the library can use.

    Raises:
        BuildError: the named folder has no usable library: it was built from other sources, does
            not suit this CPU, is damaged, or others may write it.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if not named:
        return None
    folder = Path(named)
    if openmp_runtime is None:
        raise BuildError(f"{folder}: what is built ahead needs torch's OpenMP runtime")
    try:
        index = json.loads(_read(folder, _INDEX))
        listed, sources = index["libraries"], index["sources"]
        chosen = best_for_cpu(listed, platform.machine(), cpu_features())
        if sources != build.digest_of_sources(build.find_sources()):
            raise BuildError(f"{folder}: built of other sources than this Baton's")
        if chosen is None:
            raise BuildError(f"{folder}: no library for this CPU")
        path = folder / f"{chosen['name']}.so"
        descriptor = _open_own(folder, path.name)
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{folder / _INDEX}: cannot be read ({error})") from error
    if _sha256(descriptor) != chosen["sha256"]:
        os.close(descriptor)
        raise BuildError(f"{path}: is not what was built")
    return descriptor, path


def best_for_cpu(
    libraries: Sequence[Mapping[str, object]], machine: str, features: frozenset[str]
) -> Mapping[str, object] | None:
    """Return the first library that runs on a CPU with these features; None: none does."""
    for library in libraries:
        needs = library["needs"]
        if not isinstance(needs, list):
            raise TypeError("needs: must be a list")
        if library["machine"] == machine and features.issuperset(needs):
            return library
    return None


def cpu_features() -> frozenset[str]:
    """Return the features that all cores of this machine have, as /proc/cpuinfo names them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    sets = [set(line.partition(":")[2].split()) for line in lines if line.startswith(_FEATURES)]
    return frozenset(set.intersection(*sets)) if sets else frozenset()


def _read(folder: Path, name: str) -> bytes:
    with os.fdopen(_open_own(folder, name), "rb") as file:
        return file.read()


def _open_own(folder: Path, name: str) -> int:
    """Open a file in a folder; both must belong to this user or root and be safe from others."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        for path, found in ((folder, os.fstat(folder_fd)), (folder / name, os.fstat(descriptor))):
            if not is_own(found):
                os.close(descriptor)
                owner = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
                raise BuildError(f"{path}: must be of user {os.geteuid()} alone, got {owner}")
    finally:
        os.close(folder_fd)
    return descriptor


def _sha256(descriptor: int) -> str:
    return hashlib.sha256(os.pread(descriptor, os.fstat(descriptor).st_size, 0)).hexdigest()
