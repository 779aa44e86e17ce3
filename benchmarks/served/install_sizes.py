"""Measure the disk space of an installation: the requirements of one extra after another.

The size of an extra is that of all distributions that the extra adds to the earlier extras. Their
files are counted as they are installed in this environment, torch's too. Nothing is installed or
downloaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.runner.environment import ROOT
from benchmarks.runner.run import Document, Run

EXTRAS = ("core", "node", "report")
NUM_LARGEST = 3


def run(run: Run) -> Document:
    """Measure the disk space that each extra adds to the earlier extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"core": project["dependencies"], **project["optional-dependencies"]}
    held: set[str] = set()
    sizes: dict[str, object] = {}
    for extra in EXTRAS:
        found = dict(closure(asked[extra]))
        new = {name: num_bytes(d) for name, d in found.items() if name not in held}
        held |= new.keys()
        largest = sorted(new, key=lambda name: -new[name])[:NUM_LARGEST]
        sizes[extra] = {
            "num_packages": len(new),
            "megabytes": round(sum(new.values()) / 1e6),
            "largest": {name: round(new[name] / 1e6) for name in largest},
        }
    run.show("extra", sizes)
    return {"extras": sizes}


def closure(texts: Iterable[str]) -> Iterator[tuple[str, Distribution]]:
    """Yield the name and the distribution of all that these requirements install here."""
    open_ends = list(asked_for(texts, ""))
    seen: set[tuple[str, str]] = set()
    while open_ends:
        key = (name, extra) = open_ends.pop()
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # a requirement of another platform
            continue
        yield name, found
        open_ends += asked_for(found.requires or (), extra)


def asked_for(texts: Iterable[str], extra: str) -> Iterator[tuple[str, str]]:
    """Yield the distributions that requirements name for this machine, each with its extra."""
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            yield name, ""
            for inner in requirement.extras:
                yield name, inner


def num_bytes(found: Distribution) -> int:
    """Return the bytes of all files of a distribution that exist."""
    paths = (Path(str(file.locate())) for file in found.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())
