"""How a process of ours is started: by which command, and what it inherits of the environment."""

from __future__ import annotations

import os
import sys

from baton.options import OF_ONE_PROCESS

# Of the variables that give a program its options: BATON_MAX_MODEL_LEN for --max-model-len.
ENVIRONMENT_PREFIX = "BATON"
PARENT_PIPE_VARIABLE = f"{ENVIRONMENT_PREFIX}_PARENT_PIPE"
# Starts one of our modules. (-P: not what has its name in the folder that the user is in, nor
# what has the name of a module that it imports.)
PYTHON_MODULE = (sys.executable, "-P", "-m")


def fleet_environment() -> dict[str, str]:
    """Return what the processes of a fleet inherit of this one's environment.

    What it says of options of which each process has its own, it says of whoever reads it first.
    """
    own = {f"{ENVIRONMENT_PREFIX}_{option.upper()}" for option in OF_ONE_PROCESS}
    return {name: text for name, text in os.environ.items() if name not in own}
