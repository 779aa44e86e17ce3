"""Build the library of native kernels ahead of time for several instruction sets; choose one.

A machine with such a library needs no compiler. Libraries built ahead are in one of two folders:

* Baton's wheels for Linux contain such a folder (`tools/build_wheels.py`).
* ``BATON_NATIVE_LIBRARIES`` names a folder that ``python -m baton_kernels.native.build_ahead
  FOLDER`` filled. This folder has precedence over the wheel's. Whoever can write to the folder
  could run code in Baton's processes, so folder and files must belong to this user or root, and
  must not be writable for others.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.checkpoint.cache_folder import is_own
from baton.kernel_library import build
from baton.kernel_library.build import OpenedLibrary
from baton.kernel_library.compilers import BuildError, run_tool
from baton.kernel_library.switch import SWITCH_VARIABLE, KernelSwitch, read_switch

FOLDER_VARIABLE = "BATON_NATIVE_LIBRARIES"
PACKAGED_FOLDER = "libraries"  # folder in the package baton_kernels
_INDEX = "libraries.json"
_BUILD_LIMIT_S = 3600.0  # seconds to build one library, even on a busy machine
_X86_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_X86_V4 = (*_X86_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# Beginning of the line with CPU features in /proc/cpuinfo, on x86 and on Arm.
_FEATURES = ("flags\t", "flags ", "Features")
_WIDE = "-mprefer-vector-width=512"  # by default GCC uses half of the width


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set to compile the library for.

    Attributes:
        name: name of the library's file.
        machine: machine type, as `platform.machine` names it.
        flags: compiler flags.
        needs: features that the CPU must have, by their names in /proc/cpuinfo.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


_DOTS = ("-march=x86-64-v4", "-mavx512vnni", _WIDE)
# The best build comes first, because a CPU loads the first library whose features it has.
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


def build_libraries(
    folder: Path,
    sets: Iterable[InstructionSet] = INSTRUCTION_SETS,
    machine: str | None = None,
) -> list[Path]:
    """Build the library for each instruction set of a machine type; return the files.

    Libraries in the folder that the same compiler built from the same sources with the same flags
    are kept.

    Args:
        machine: machine type to build for; None: the type of this machine. For other types,
            Debian's cross compiler is used (``aarch64-linux-gnu-gcc``); ``CC`` only names the
            compiler for this machine's type.

    Raises:
        BuildError: there are no sources or no compiler, or the compiler failed.
        OSError: the folder cannot be written.
    """
    machine = machine or platform.machine()
    wanted = [one for one in sets if one.machine == machine]
    if not wanted:
        raise BuildError(f"no instruction sets are known for {machine}")
    sources = build.find_sources()
    is_native = machine == platform.machine()
    compiler = build.find_compiler() if is_native else _find_cross_compiler(machine)
    recipe = {
        "sources": build.digest_of_sources(sources),
        "compiler": run_tool([*compiler, "--version"]).partition("\n")[0],
    }
    folder.mkdir(parents=True, exist_ok=True)
    kept = _find_kept(folder, recipe)
    files, index = [], []
    for one in wanted:
        file, flags = folder / f"{one.name}.so", [*build.FLAGS, build.THREADS, *one.flags]
        if (content := kept.get((one.name, *flags))) is None:
            content = build.compile_library(sources, compiler, flags, _BUILD_LIMIT_S)
            file.write_bytes(content)
            file.chmod(0o644)
        files.append(file)
        index.append(
            {"name": one.name, "machine": one.machine, "needs": one.needs, "flags": flags,
             "sha256": hashlib.sha256(content).hexdigest()}
        )  # fmt: skip
        text = json.dumps({**recipe, "libraries": index}, indent=1)
        (folder / _INDEX).write_text(text + "\n", encoding="utf-8")
    return files


def _find_cross_compiler(machine: str) -> list[str]:
    name = f"{machine}-linux-gnu-gcc"
    if (path := shutil.which(name)) is None:
        raise BuildError(f"{name} is not installed (apt install gcc-{machine}-linux-gnu)")
    return [path]


def _find_kept(folder: Path, recipe: Mapping[str, str]) -> dict[tuple[str, ...], bytes]:
    """Return the undamaged libraries of a folder that this recipe made, by name and flags."""
    kept: dict[tuple[str, ...], bytes] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads((folder / _INDEX).read_bytes())
        if {name: index[name] for name in recipe} != recipe:
            return {}
        for one in index["libraries"]:
            content = (folder / f"{one['name']}.so").read_bytes()
            if hashlib.sha256(content).hexdigest() == one["sha256"]:
                kept[one["name"], *one["flags"]] = content
    return kept


def open_library_built_ahead() -> OpenedLibrary | None:
    """Open the best library for this CPU that was built ahead; None: a library must be built.

    Raises:
        BuildError: the folder in ``BATON_NATIVE_LIBRARIES`` has no usable library; or the
            wheel's library is damaged; or ``BATON_NATIVE_KERNELS`` names an instruction set that
            has no library or that this CPU lacks.
    """
    switch = read_switch([one.name for one in INSTRUCTION_SETS])
    if named := os.environ.get(FOLDER_VARIABLE):
        return _open_best(Path(named), _read_index(Path(named)), switch)
    if switch.must_build or (not switch.instruction_set and build.chooses_cpu()):
        return None
    folder = find_packaged_libraries()
    if folder is None:
        if switch.instruction_set:
            raise BuildError(f"{SWITCH_VARIABLE}={switch.instruction_set}: no library built ahead")
        return None
    index = _read_index(folder, is_packaged=True)
    try:
        return _open_best(folder, index, switch, is_packaged=True)
    except _UnsuitableError:
        if switch.instruction_set:
            raise
        return None


def find_packaged_libraries() -> Path | None:
    """Return the folder of libraries in Baton's wheel; None: there is no such folder."""
    found = importlib.util.find_spec("baton_kernels")  # does not import the package or torch
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).resolve().parent / PACKAGED_FOLDER
    return folder if (folder / _INDEX).exists() else None


class _UnsuitableError(BuildError):
    """A folder has no library for this CPU, or its libraries were built from other sources."""


@dataclass(frozen=True, slots=True)
class _Index:
    """The libraries in a folder, and the digest of their sources."""

    libraries: Sequence[Mapping[str, Any]]
    sources: str


def _read_index(folder: Path, is_packaged: bool = False) -> _Index:
    """Read the index of libraries in a folder; raises BuildError."""
    try:
        with os.fdopen(_open(folder, _INDEX, is_packaged), "rb") as file:
            index = json.loads(file.read())
        return _Index(index["libraries"], index["sources"])
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{folder / _INDEX}: cannot be read ({error})") from error


def _open_best(
    folder: Path, index: _Index, switch: KernelSwitch, is_packaged: bool = False
) -> OpenedLibrary:
    """Open a folder's best library for this CPU, or the library that the switch names.

    Raises:
        _UnsuitableError: no library suits this CPU, or the libraries were built from other sources.
        BuildError: the library is damaged, or other users could write to it.
    """
    if index.sources != build.digest_of_sources(build.find_sources()):
        raise _UnsuitableError(f"{folder}: built from other sources than this Baton's")
    wanted = switch.instruction_set
    try:
        listed = [one for one in index.libraries if wanted in ("", one["name"])]
        chosen = best_for_cpu(listed, platform.machine(), cpu_features())
        if chosen is None:
            which = f"library {wanted}" if wanted else "library"
            raise _UnsuitableError(f"{folder}: no {which} for this CPU")
        name, digest = str(chosen["name"]), chosen["sha256"]
        path = folder / f"{name}.so"
        descriptor = _open(folder, path.name, is_packaged)
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror or error}") from error
    except (KeyError, TypeError) as error:
        raise BuildError(f"{folder / _INDEX}: cannot be read ({error})") from error
    if _sha256(descriptor) != digest:
        os.close(descriptor)
        raise BuildError(f"{path}: has changed since it was built")
    return OpenedLibrary(descriptor, path, instruction_set=name)


def best_for_cpu(
    libraries: Sequence[Mapping[str, object]], machine: str, features: frozenset[str]
) -> Mapping[str, object] | None:
    """Return the first library that runs on a CPU with these features, or None."""
    for library in libraries:
        needs = library["needs"]
        if not isinstance(needs, list):
            raise TypeError("needs: must be a list")
        if library["machine"] == machine and features.issuperset(needs):
            return library
    return None


def cpu_features() -> frozenset[str]:
    """Return the features that all cores of this machine have, by their names in /proc/cpuinfo.

    Returns an empty set if this file is missing, as on macOS.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    sets = [set(line.partition(":")[2].split()) for line in lines if line.startswith(_FEATURES)]
    return frozenset(set.intersection(*sets)) if sets else frozenset()


def _open(folder: Path, name: str, is_packaged: bool) -> int:
    """Open a file in a folder and return its descriptor.

    Raises BuildError unless file and folder belong to this user or root and are not writable for
    others. The installed package is exempt, because who can write to it can change Baton's Python
    code, too.
    """
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        follow = 0 if is_packaged else os.O_NOFOLLOW  # a package's files may be links
        descriptor = os.open(name, os.O_RDONLY | follow | os.O_CLOEXEC, dir_fd=folder_fd)
        for path, found in ((folder, os.fstat(folder_fd)), (folder / name, os.fstat(descriptor))):
            if not is_packaged and not is_own(found):
                os.close(descriptor)
                owner = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
                raise BuildError(f"{path}: must belong to user {os.geteuid()} alone, got {owner}")
    finally:
        os.close(folder_fd)
    return descriptor


def _sha256(descriptor: int) -> str:
    return hashlib.sha256(os.pread(descriptor, os.fstat(descriptor).st_size, 0)).hexdigest()
