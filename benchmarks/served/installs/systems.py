"""System: the Debian, Python and torch of a fresh system, and how Baton is installed in it.

The commands are read from docs/quickstart.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from benchmarks.runner.environment import ROOT

DEBIAN = {"bookworm": "12", "trixie": "13", "forky": "14 (testing)"}
PAGE = ROOT / "docs" / "quickstart.md"
CPU_BUILD, PYPI = "CPU build", "PyPI"
_COMMANDS = re.compile(r"^```sh\n(pip install .*?)^```", re.MULTILINE | re.DOTALL)
_CPU_INDEX = re.compile(r"(--extra-index-url|--torch-backend) \S+ ")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class System:
    """A system in which Baton is installed.

    Attributes:
        name: the system's name for `--only`.
        suite: code name of the Debian release.
        python: version of the Python interpreter.
        tool: the installing program; the quickstart has a command for each of them.
        torch: package index from which torch is installed.
        debian_machine: Debian's name of the machine type; QEMU emulates types other than this
            machine's.
        more: additional requirements to install.
        kernels: value of `BATON_NATIVE_KERNELS`.
        is_copied: whether the Python interpreter is copied from this machine; false: Debian's
            interpreter is used.
    """

    name: str
    suite: str
    python: str
    tool: Literal["pip", "uv", "pipx", "uvx"] = "pip"
    torch: str = PYPI
    debian_machine: str = "amd64"
    more: tuple[str, ...] = ()
    kernels: str = ""
    is_copied: bool = False

    @property
    def machine(self) -> str:
        """Return Python's name of the machine type."""
        return _MACHINES[self.debian_machine]

    @property
    def interpreter(self) -> str:
        """Return the path of the Python interpreter in the system."""
        return f"{'/python' if self.is_copied else '/usr'}/bin/python{self.python}"

    @property
    def command(self) -> str:
        """Return the quickstart's command for the tool, without an index if torch is from PyPI."""
        command = documented_commands()[self.tool]
        return command if self.torch == CPU_BUILD else _CPU_INDEX.sub("", command)


def documented_commands() -> dict[str, str]:
    """Return the quickstart's commands that install Baton, by tool."""
    found = _COMMANDS.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE}: no commands that install"
    lines = [line.partition("  #")[0].strip() for line in found[1].splitlines()]
    return {line.split()[0]: line for line in lines}


def _emulated(kernels: str) -> System:
    # torch's last release whose package for this machine type is built for CPUs only.
    torch = ("torch==2.9.1",)
    name = f"debian12-python3.11-{kernels}"
    return System(
        name, "bookworm", "3.11", "uv", PYPI, debian_machine="arm64", more=torch, kernels=kernels
    )


SYSTEMS = (
    System("debian12-python3.11-pip", "bookworm", "3.11", "pip", CPU_BUILD),
    System("debian12-python3.11-uv", "bookworm", "3.11", "uv", CPU_BUILD),
    System("debian12-python3.11-pipx", "bookworm", "3.11", "pipx", CPU_BUILD),
    System("debian12-python3.11-uvx", "bookworm", "3.11", "uvx", CPU_BUILD),
    System("debian12-python3.11-pypi", "bookworm", "3.11"),
    System("debian12-python3.12-pypi", "bookworm", "3.12", "uv", is_copied=True),
    System("debian13-python3.13-pypi", "trixie", "3.13", "uv"),
    System("debian14-python3.14-pypi", "forky", "3.14", "uv"),
    *(_emulated(kernels) for kernels in ("armv8.6-a", "armv8.2-a", "armv8-a")),
)
