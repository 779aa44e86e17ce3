"""Puts native libraries that are built ahead into a wheel, and tags it with their machine type.

hatchling runs this for every wheel. `tools/build_wheels.py` sets ``BATON_WHEEL_LIBRARIES`` to the
folder of the libraries. Without this variable, the wheel has only C sources, and is for every
platform.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER_VARIABLE = "BATON_WHEEL_LIBRARIES"
GLIBC = "manylinux_2_28"  # the wheels of PyTorch and NIXL have this tag, too


class WheelHook(BuildHookInterface[Any]):
    """Adds a folder of native libraries to the package `baton_kernels` in a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries and their machine type's tag to the wheel that is being built."""
        named = os.environ.get(FOLDER_VARIABLE)
        if not named or version == "editable":
            return
        index = Path(named) / "libraries.json"
        libraries = json.loads(index.read_text(encoding="utf-8"))["libraries"]
        (machine,) = {one["machine"] for one in libraries}
        for file in (index, *(index.with_name(f"{one['name']}.so") for one in libraries)):
            build_data["force_include"][str(file)] = f"baton_kernels/libraries/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{GLIBC}_{machine}"
