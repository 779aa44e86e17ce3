"""Builds the C library for all instruction sets, to be shipped in a wheel.

Run ``python -m baton_kernels.native.build_ahead FOLDER``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baton.kernel_library.ahead import build_libraries
from baton.kernel_library.compilers import BuildError


def main(words: Sequence[str]) -> int:
    """Build the library into the given folder; return the exit code."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.stderr.write("usage: python -m baton_kernels.native.build_ahead FOLDER\n")
        return 2
    began = time.monotonic()
    try:
        files = build_libraries(Path(words[0]))
    except (BuildError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    names = ", ".join(file.stem for file in files)
    sys.stdout.write(f"built for {names} in {time.monotonic() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
