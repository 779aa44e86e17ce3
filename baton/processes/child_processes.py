"""Child processes: the command, the environment and the heap with which Baton starts processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from baton.options import OF_ONE_PROCESS

# Prefix of environment variables for options: BATON_MAX_MODEL_LEN stands for --max-model-len.
ENVIRONMENT_PREFIX = "BATON"
PARENT_PIPE_VARIABLE = f"{ENVIRONMENT_PREFIX}_PARENT_PIPE"
# Environment variables that a node's libraries read at their import; the user's values have
# precedence.
THREAD_VARIABLES = {
    # Number of times that threads of torch's OpenMP check for work before they sleep, which takes
    # 0.07 ms if a `pause` takes 7 ns. With the default, 300,000 times, they spin for 2 ms on cores
    # that other processes need. Native kernels have threads of their own (kernels/csrc/team.c).
    "GOMP_SPINCOUNT": "10000",
    # No step uses NumPy's BLAS, which would start threads and take 32 MiB for each.
    "OPENBLAS_NUM_THREADS": "1",
}
_M_ARENA_MAX = -8  # parameter of mallopt(3)
# Runs one of Baton's modules; -P keeps modules in the user's current folder from being imported in
# their place.
PYTHON_MODULE = (sys.executable, "-P", "-m")


def fleet_environment() -> dict[str, str]:
    """Return the environment that the processes of a fleet inherit from this process.

    Leaves out environment variables of options, such as listening addresses, that differ per
    process.
    """
    own = {f"{ENVIRONMENT_PREFIX}_{option.upper()}" for option in OF_ONE_PROCESS}
    return {name: text for name, text in os.environ.items() if name not in own}


def use_one_heap() -> None:
    """Let all threads of this process share one heap of the C library; call before threads start.

    Otherwise each thread gets a heap of its own, whose free memory other threads cannot use. This
    has an effect only with glibc.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
