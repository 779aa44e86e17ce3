"""Checks of the installation: packages, compiler, native kernels, cache, ports."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.access.exposure import check_is_free
from baton.addresses import DEFAULT_ADDRESS
from baton.api.errors import ConfigError
from baton.checkpoint.cache_folder import CacheFolderError, cache_folder, own_cache_folder
from baton.checkpoint.weights_cache import used_bytes
from baton.cli.doctor.finding import Finding, Grade
from baton.kernel_library.build import find_compiler
from baton.kernel_library.compilers import BuildError, run_tool
from baton.kernel_library.state import ADVICE, SLOWER, KernelState
from baton.kernel_library.switch import SWITCH_VARIABLE
from baton.version import __version__

# Advice for systems without a GPU, because PyPI's torch brings gigabytes of CUDA libraries.
_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
_OF_NODES = ("torch", "numpy", "safetensors", "gguf", "nixl")


def version_of(package: str) -> str:
    """Return the version of an installed package; empty if not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def look_at_packages() -> Finding:
    """Check the packages that nodes need and other programs do not."""
    found = {name: version_of(name) for name in _OF_NODES}
    value = f"Baton {__version__}, Python {platform.python_version()}"
    value += "".join(f", {name} {number}" for name, number in found.items() if number)
    missing = [name for name, number in found.items() if not number]
    if not missing:
        return Finding("packages", value)
    advice = (
        f"nodes need {', '.join(missing)}: pip install {_CPU_INDEX} 'baton-serve[node]'; "
        "for a GPU leave the index out"
    )
    return Finding("packages", value, Grade.BAD, advice)


def look_at_compiler(kernels: KernelState) -> Finding:
    """Check for a compiler, which is needed unless native kernels are built already."""
    try:
        compiler = find_compiler()
        shown = run_tool([*compiler, "--version"]).partition("\n")[0]
    except BuildError as error:
        needs_none = kernels.path is not None or kernels.is_off
        grade = Grade.OK if needs_none else Grade.SLOW
        return Finding("compiler", str(error), grade, "" if needs_none else ADVICE)
    return Finding("compiler", f"{compiler[0]}: {shown}")


def look_at_kernels(kernels: KernelState) -> Finding:
    """Check whether native kernels are built for this CPU."""
    if kernels.is_off:
        advice = f"{SLOWER}: {kernels.advice}"
        return Finding("kernels", f"off ({SWITCH_VARIABLE})", Grade.SLOW, advice)
    if kernels.problem:
        # If only the compiler is missing, the report's line about the compiler has the advice.
        is_compiler = kernels.advice == ADVICE
        advice = f"until then {SLOWER}" if is_compiler else f"{SLOWER}: {kernels.advice}"
        return Finding("kernels", f"none: {kernels.problem}", Grade.SLOW, advice)
    if kernels.path is None:
        return Finding("kernels", "not built yet: the first start builds them, about a minute")
    if kernels.instruction_set:
        return Finding("kernels", f"built ahead for {kernels.instruction_set}: {kernels.path}")
    return Finding("kernels", f"built: {kernels.path}")


def look_at_cache() -> Finding:
    """Check whether the cache for kernels and converted models is writable."""
    try:
        folder = own_cache_folder("native").parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (CacheFolderError, OSError) as error:
        advice = (
            "set BATON_CACHE to a folder that can be written; until then a temporary one is used"
        )
        return Finding("cache", f"cannot be written: {_problem(error)}", Grade.SLOW, advice)
    packed_bytes = used_bytes()
    packed = f", packed weights take {packed_bytes / 2**20:.0f} MiB" if packed_bytes else ""
    return Finding("cache", f"{folder}{packed}")


def look_at_ports(listen: str = DEFAULT_ADDRESS, http_listen: str = "127.0.0.1:8000") -> Finding:
    """Check whether the addresses of `baton up` are free."""
    taken = []
    for option, address in (("--listen", listen), ("--http-listen", http_listen)):
        try:
            check_is_free(option, address)
        except ConfigError:
            taken.append(f"{address} ({option})")
    if not taken:
        return Finding("ports", f"{listen} and {http_listen} are free")
    advice = "end the program there (is it a `baton up`?), or give another address"
    return Finding("ports", f"taken: {', '.join(taken)}", Grade.BAD, advice)


def _problem(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where: Path | str = error.filename or cache_folder("native")
    return f"{where}: {error.strerror or os.strerror(error.errno or 0)}"
