"""Checks of the machine: CPU, cores, memory, shared memory, network devices, GPUs.

Paths of the files to read are parameters, so that tests can describe other machines.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.cli.doctor.finding import Finding, Grade
from baton.kernel_library.ahead import INSTRUCTION_SETS, cpu_features
from baton.processes.cores import usable_cores
from baton.registry import Registry

_GIB = 2**30
_LEAST_MEMORY = 1 * _GIB  # bytes for a node with a small model; torch alone takes a third
_LEAST_SHARED_MEMORY = 256 * 2**20
_LEAST_DESCRIPTORS = 4096
_NET = Path("/sys/class/net")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ADDRESS_OF_DEVICE = 0x8915  # number of the ioctl SIOCGIFADDR
# Given as text, because `baton` must not import the engine.
_READERS: Registry[Any] = Registry(
    "figure", {"memory": "engine.worker.host.host_memory:read_host_memory"}
)


def look_at_cpu(features: frozenset[str] | None = None) -> Finding:
    """Check the CPU for the best instruction set of native kernels."""
    has = cpu_features() if features is None else features
    machine = platform.machine()
    sets = [one for one in INSTRUCTION_SETS if one.machine == machine]
    best = next((one for one in sets if has.issuperset(one.needs)), None)
    if best is None:
        known = ", ".join(sorted({one.machine for one in INSTRUCTION_SETS}))
        advice = f"native kernels know {known}; torch computes here"
        return Finding("CPU", machine, Grade.SLOW, advice)
    if best is sets[-1]:
        advice = f"it lacks {', '.join(sets[-2].needs)}; on a virtual machine pass the host's CPU"
        return Finding("CPU", best.name, Grade.SLOW, advice)
    return Finding("CPU", best.name)


def look_at_cores() -> Finding:
    """Check how many cores this process may use."""
    usable, all_of_them = len(usable_cores()), os.cpu_count() or 1
    value = f"{usable} of {all_of_them}" if usable < all_of_them else str(usable)
    if usable > 1:
        return Finding("cores", value)
    advice = "nodes share one core; use one node (baton up --prefill 0), or give it more cores"
    return Finding("cores", value, Grade.SLOW, advice)


def look_at_memory() -> Finding:
    """Check the memory, within the limits of control groups."""
    found = _READERS.load("memory")()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    value = f"{_gib(found.available)} free of {_gib(found.total)}"
    if found.total < machine * 0.95:
        value += f" (limit of the control group; the machine has {_gib(machine)})"
    if found.available < _LEAST_MEMORY:
        advice = f"a node needs {_gib(_LEAST_MEMORY)} or more: free some, or raise the limit"
        return Finding("memory", value, Grade.BAD, advice)
    return Finding("memory", value)


def look_at_huge_pages(file: Path = _HUGE_PAGES) -> Finding:
    """Check whether the kernel gives huge pages to programs that ask for them."""
    try:
        text = file.read_text(encoding="ascii")
    except OSError:
        return Finding("huge pages", "unknown: the kernel does not say")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return Finding("huge pages", mode)
    advice = f"as root: echo madvise > {file} (decodes read weights 3 to 10 % faster)"
    return Finding("huge pages", mode or "none", Grade.SLOW, advice)


def look_at_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Check the free shared memory, through which nodes on one machine pass KV blocks."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "nodes of one machine need it: mount a tmpfs there"
        return Finding("shared memory", f"{folder}: {error.strerror}", Grade.BAD, advice)
    value = f"{_gib(free)} free in {folder}"
    if free >= _LEAST_SHARED_MEMORY:
        return Finding("shared memory", value)
    advice = "nodes may end by SIGBUS: docker run --shm-size=1g, or an emptyDir of medium Memory"
    return Finding("shared memory", value, Grade.SLOW, advice)


def look_at_network(folder: Path = _NET) -> Finding:
    """List the IPv4 addresses of network devices that are up, without loopback."""
    try:
        names = sorted(path.name for path in folder.iterdir() if _is_up(path))
    except OSError:
        names = []
    devices = [f"{name} {_address_of(name)}".strip() for name in names if name != "lo"]
    if not devices:
        return Finding("network", "loopback only")
    first = devices[0].split()[0]
    advice = f"only for nodes on several machines: UCX_NET_DEVICES={first} names the one to use"
    return Finding("network", ", ".join(devices), Grade.OK, advice)


def look_at_descriptors() -> Finding:
    """Check how many files and connections a process may have open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _LEAST_DESCRIPTORS:
        return Finding("open files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}")
    advice = "fewer connections than that at a time; raise the hard limit (ulimit -Hn)"
    return Finding("open files", f"{hard:,}", Grade.SLOW, advice)


def look_at_gpus(
    torch_version: str, driver: Path = Path("/proc/driver/nvidia/gpus"), devices: str = "/dev"
) -> Finding:
    """Report the NVIDIA GPUs, and whether torch can use them.

    Args:
        torch_version: version of the installed torch; empty if not installed.
        driver: folder in which the driver describes its GPUs.
        devices: folder of device files.
    """
    names = _gpu_names(sorted(driver.glob("*/information")))
    if not names and not (Path(devices) / "nvidiactl").exists():
        return Finding("GPU", "none: computes on the CPU")
    value = ", ".join(names) or "NVIDIA"
    if torch_version.endswith("+cpu"):
        advice = f"torch {torch_version} is a build for CPUs: install torch from PyPI instead"
        return Finding("GPU", value, Grade.SLOW, advice)
    return Finding("GPU", value)


def _gpu_names(files: Sequence[Path]) -> list[str]:
    names = []
    for file in files:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        names.append(models[0] if models else "NVIDIA")
    return names


def _is_up(device: Path) -> bool:
    try:  # "unknown" is accepted: some virtual devices say so although they work
        return (device / "operstate").read_text(encoding="ascii").strip() in ("up", "unknown")
    except OSError:
        return False


def _address_of(device: str) -> str:
    """Return a device's IPv4 address; empty if it has none."""
    request = struct.pack("256s", device.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _ADDRESS_OF_DEVICE, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
