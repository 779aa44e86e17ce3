"""Table of GGUF architectures: maps the metadata `general.architecture` to an `Architecture`.

A new architecture needs a row in ``GGUF`` of `models/families/NAME.py`, its name in
`baton/checkpoint/families.py`, and a row in tests/numerics/gguf_families.py. Knows no contents of
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.api.errors import ModelLoadError
from baton.checkpoint.families import GGUF_ARCHITECTURES
from baton.checkpoint.gguf.architecture import Architecture, Keys
from baton.checkpoint.gguf.file import GgufFile
from baton.registry import Registry

# Architecture's name -> table of its family, which in turn maps the name to the `Architecture`.
ARCHITECTURES: Registry[Mapping[str, Architecture]] = Registry(
    "GGUF architecture", GGUF_ARCHITECTURES
)

# The architecture that files of image projectors name; such files accompany GGUF files of models.
_PROJECTOR = "clip"


def architecture_of(file: GgufFile) -> Architecture:
    """Return the `Architecture` of a file; raises ModelLoadError if there is none."""
    name = file.metadata.get("general.architecture")
    if name == _PROJECTOR:
        problem = "an image projector (mmproj) is not read; images need the model's safetensors"
        raise ModelLoadError(f"{file.path}: {problem}")
    if not isinstance(name, str) or name not in ARCHITECTURES.names():
        raise ModelLoadError(
            f"{file.path}: architecture {name!r:.100} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES.names()))}"
        )
    row, keys = ARCHITECTURES.load(name)[name], Keys(file, name)
    if not row.may_have_experts and keys.get("expert_count"):
        raise keys.wrong("expert_count", "experts are not supported with this architecture")
    variant = row.variant and row.variant(keys)
    return variant or row
