"""Find an adapter by what a user typed: a path, an installed package, or an id of the hub.

    LLM                 any path           package    hub id; fetched if needed
    routers, nodes      path below a root  package    hub id; must be cached on this machine

Refuses to know: what is in an adapter's files.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from baton.adapters.config import CONFIG_FILE
from baton.adapters.digest import AdapterError
from baton.adapters.files import WEIGHTS_FILE, find_adapter
from baton.adapters.gguf import GGUF
from baton.api.errors import ModelLoadError, reason_of
from baton.checkpoint.hub import HubName, fetch, find_cached

_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*")
_HUB = "hf://"
_FILES = (CONFIG_FILE, WEIGHTS_FILE)


def locate_adapter(source: str | Path) -> Path:
    """Return an adapter's folder or GGUF file; fetch it from the hub if this machine lacks it.

    Args:
        source: a path; the name of an installed package with one adapter; or a hub id, such as
            ``OWNER/NAME``, or ``hf://OWNER/NAME/FILE.gguf`` for a file.

    Raises:
        AdapterError: nothing is there, or the hub cannot be reached and nothing is cached.
    """
    try:
        path = Path(source).expanduser()
        is_here = path.exists()
    # For example, the path has an unknown ~user, or links form a circle.
    except (RuntimeError, OSError, ValueError) as error:
        raise AdapterError(f"{str(source)!r:.200}: is no usable path: {error}") from error
    if is_here or isinstance(source, Path):
        return path
    packaged = _in_package(source)
    if packaged is not None:
        return packaged
    name = _hub_name(source)
    if name is None:
        problem = "no such folder or file, and no installed package; a hub id is OWNER/NAME"
        raise AdapterError(f"{source!r:.200}: {problem}")
    try:
        return fetch(source, name, _FILES)
    except ModelLoadError as error:
        raise AdapterError(str(error).removeprefix("model: ")) from error


def find_named(root: Path | None, source: str) -> Path:
    """Return the folder or GGUF file on this machine of an adapter that an operator named.

    Args:
        root: folder below which an adapter's files must lie; None: paths are not allowed.
        source: a path below ``root``; the name of an installed package with one adapter; or a hub
            id whose files are in a cache of this machine.

    Raises:
        AdapterError: nothing is there, or the path or a link leads out of ``root``.
    """
    shown = f"{source!r:.200}"
    if root is not None and not source.startswith(_HUB):
        path = find_adapter(root, source)
        if path.exists():
            return path
    if (packaged := _in_package(source)) is not None:
        return packaged
    name = _hub_name(source)
    if name is None:
        where = "here, as there is no --adapter-root" if root is None else "below --adapter-root"
        problem = f"no such folder or file {where}, and no installed package"
        raise AdapterError(f"{shown}: {problem}; a hub id is OWNER/NAME")
    try:
        found = find_cached(source, name, _FILES)
    except ModelLoadError as error:
        raise AdapterError(str(error).removeprefix("model: ")) from error
    if found is None:
        problem = "no such folder, and the hub's cache of this machine does not have it; fetch it"
        raise AdapterError(f"{shown}: {problem} with `hf download`")
    return found


def _hub_name(source: str) -> HubName | None:
    """Parse the id of a repository or file of the hub; return None for paths and other texts."""
    if source.startswith((".", "/", "~")):
        return None
    name = HubName.parse(source)
    is_plain = name is not None and not {".", ".."} & set(name.repository.split("/"))
    return name if is_plain else None


def _in_package(name: str) -> Path | None:
    """Return the adapter in an installed package, or None if there is no such package or adapter.

    Raises AdapterError if the package has several adapters.
    """
    if _PACKAGE.fullmatch(name) is None:
        return None
    try:
        package = importlib.metadata.distribution(name)
        files = package.files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    except OSError as error:
        raise AdapterError(f"package {name}: cannot be read: {reason_of(error)}") from error
    folders = [path.parent for path in files if path.name == CONFIG_FILE]
    ggufs = [path for path in files if path.suffix.lower() == GGUF]
    found = sorted({str(package.locate_file(path)) for path in (*folders, *ggufs)})
    if len(found) > 1:
        names = ", ".join(Path(one).name for one in found[:4])
        raise AdapterError(f"package {name}: has {len(found)} adapters ({names}); name a path")
    return Path(found[0]) if found else None
