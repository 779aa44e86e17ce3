"""Read ``BATON_NATIVE_KERNELS``, which turns native kernels off or chooses their library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kernel_library.compilers import BuildError

SWITCH_VARIABLE = "BATON_NATIVE_KERNELS"
_OFF = ("0", "off", "false", "no")
_ON = ("", "1", "on", "true", "yes")
_BUILD = "build"


@dataclass(frozen=True, slots=True)
class KernelSwitch:
    """The choices in ``BATON_NATIVE_KERNELS``.

    Attributes:
        must_build: whether to build the library on this machine even if a library was built ahead.
        instruction_set: instruction set whose library must be loaded; empty: the best for this CPU.
    """

    must_build: bool = False
    instruction_set: str = ""


def are_kernels_off() -> bool:
    """Return whether the environment turns native kernels off."""
    return os.environ.get(SWITCH_VARIABLE, "").lower() in _OFF


def read_switch(instruction_sets: Sequence[str]) -> KernelSwitch:
    """Read the choices in ``BATON_NATIVE_KERNELS``.

    Args:
        instruction_sets: names of instruction sets that the variable may have.

    Raises:
        BuildError: the variable has an unknown name.
    """
    value = os.environ.get(SWITCH_VARIABLE, "").lower()
    if value in _ON or value in _OFF:
        return KernelSwitch()
    if value == _BUILD:
        return KernelSwitch(must_build=True)
    if value in instruction_sets:
        return KernelSwitch(instruction_set=value)
    known = ", ".join(("0", "1", _BUILD, *instruction_sets))
    raise BuildError(f"{SWITCH_VARIABLE}: must be one of {known}, got {value}")
