"""Find out whether there are native kernels for this CPU, and build them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.kernel_library.ahead import FOLDER_VARIABLE, open_library_built_ahead
from baton.kernel_library.build import find_library, open_library
from baton.kernel_library.compilers import BuildError
from baton.kernel_library.switch import SWITCH_VARIABLE, are_kernels_off

BUILDING = "building native kernels for this CPU, once; takes about a minute"
# Texts: what running without native kernels costs, and advice if no compiler is installed.
SLOWER = "tokens come 4 to 5 times slower"
ADVICE = "install a C compiler (apt install gcc, or dnf install gcc), and start again"
_REINSTALL = "install Baton again (pip install --force-reinstall --no-deps baton-serve)"


@dataclass(frozen=True, slots=True)
class KernelState:
    """State of the native kernels for this CPU.

    Attributes:
        path: file of the library; None: there is no library.
        problem: why the library cannot be built or used; empty: the library exists or can be built.
        is_off: whether the environment turns native kernels off.
        instruction_set: instruction set for which the library was built ahead; empty: it was built
            on this machine.
        advice: what the user can do about missing native kernels; empty: nothing is to be done.
    """

    path: Path | None = None
    problem: str = ""
    is_off: bool = False
    instruction_set: str = ""
    advice: str = ""

    @property
    def can_be_built(self) -> bool:
        """Return whether the library is missing but can be built."""
        return self.path is None and not self.problem and not self.is_off


def find_kernels() -> KernelState:
    """Return the state of the native kernels, without building them, in some milliseconds."""
    if are_kernels_off():
        return KernelState(is_off=True, advice=f"unset {SWITCH_VARIABLE}")
    try:
        ahead = open_library_built_ahead()
    except BuildError as error:
        chosen = [one for one in (FOLDER_VARIABLE, SWITCH_VARIABLE) if os.environ.get(one)]
        advice = f"unset {chosen[0]}" if chosen else _REINSTALL
        return KernelState(problem=str(error), advice=advice)
    if ahead is not None:
        os.close(ahead.descriptor)
        return KernelState(ahead.path, instruction_set=ahead.instruction_set)
    try:
        return KernelState(find_library())
    except BuildError as error:
        return KernelState(problem=str(error), advice=ADVICE)


def build_kernels(on_build: Callable[[], None]) -> KernelState:
    """Build the library if it is missing; wait if another process builds it.

    Args:
        on_build: called before the compiler starts.
    """
    state = find_kernels()
    if not state.can_be_built:
        return state
    try:
        opened = open_library(on_build)
    except BuildError as error:
        return KernelState(problem=str(error), advice=ADVICE)
    os.close(opened.descriptor)
    return KernelState(opened.path)
