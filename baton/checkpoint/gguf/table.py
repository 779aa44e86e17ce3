"""Table of GGUF architectures: `general.architecture` -> its row.

To add one, add a row in `dense.py`, `experts.py` or `hybrids.py`, and one in
tests/numerics/gguf_families.py. Knows no tensor's content.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.architecture import Architecture, Keys
from baton.checkpoint.gguf.dense import DENSE
from baton.checkpoint.gguf.experts import WITH_EXPERTS
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.gguf.hybrids import HYBRIDS

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **WITH_EXPERTS, **HYBRIDS}


def architecture_of(file: GgufFile) -> Architecture:
    """Return a file's row; raises ModelLoadError if there is none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {name!r:.100} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    row, keys = ARCHITECTURES[name], Keys(file, name)
    if name in DENSE and keys.get("expert_count"):
        raise keys.wrong("expert_count", "experts are not supported with this architecture")
    variant = row.variant and row.variant(keys)
    return variant or row
