"""Own packages: lets Python import Baton's packages from the folder of `baton`.

Baton is installed as several packages (`engine`, `models`, `router`, ...). The folder that Python
searches first may contain a user's file with the name of such a package.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# All packages that Baton's distribution installs beside `baton`.
NAMES = (
    "router", "encode_node", "prefill_node", "decode_node", "node_runtime", "sim_node", "loadtest",
    "engine", "kvconnector", "models", "baton_kernels",
)  # fmt: skip
_HOME = Path(__file__).absolute().parents[1]
# In a checkout of the repository, the package `baton_kernels` is in another folder.
_PLACES = (_HOME, _HOME / "kernels")


class _OwnPackages(MetaPathFinder):
    """Finder that Python's import system asks first, which only finds Baton's packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of one of Baton's packages; None for other modules."""
        if path is not None or fullname not in NAMES:
            return None
        return PathFinder.find_spec(fullname, [str(place) for place in _PLACES])


def prefer_own_packages() -> None:
    """Import Baton's packages from the folder of `baton` from now on.

    Raises:
        ImportError: a module that is not Baton's was imported under the name of a package of Baton.
    """
    for name in NAMES:
        if (module := sys.modules.get(name)) is None:
            continue
        if (other := _other_origin(module.__spec__)) is not None:
            raise ImportError(
                f"{other} was imported as {name!r}, the name of a package of Baton: "
                f"rename it, or use Baton in a process of its own",
                name=name,
            )
    if not any(isinstance(finder, _OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackages())


def warn_of_hidden_files() -> None:
    """Warn of each of the user's modules that cannot be imported because of Baton's packages."""
    for name in NAMES:
        if (other := _other_origin(PathFinder.find_spec(name))) is not None:
            warnings.warn(
                f"{other} cannot be imported beside Baton, which has a package {name!r}: rename it",
                RuntimeWarning,
                stacklevel=4,
            )


def _other_origin(spec: ModuleSpec | None) -> str | None:
    """Return the file of a module that is not Baton's; None: the module is Baton's or missing."""
    if spec is None:
        return None
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), spec.name)
    package = Path(origin).resolve().parent
    return None if package.parent in [place.resolve() for place in _PLACES] else origin
