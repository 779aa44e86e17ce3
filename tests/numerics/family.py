"""One row of the table of families: what is tested of one architecture.

Refuses to know: which architectures there are, what is asserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture's test cases.

    Attributes:
        variants: their names -> fields of their config, beyond those of `make_hugging_face_model`.
            The plainest first; the last, with layers of every kind, also runs split.
        refused: fields of the last one's config.json -> values that change what transformers
            computes, and that ours must therefore refuse, naming the field; beyond `REFUSED`. A
            name with a dot is a field of an object.
    """

    variants: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, Any] = field(default_factory=dict)
