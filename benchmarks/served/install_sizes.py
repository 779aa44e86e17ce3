"""Measure the disk space of an installation: the project's requirements, extra by extra.

Counts the files of all distributions that an extra adds to the extras before. Nothing is installed
or downloaded; torch counts as the build in this environment.
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
    """Measure the disk space that each extra adds to the extras before."""
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
    """Yield the name of each distribution that requirements install here, and the distribution."""
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
    """Yield the names that requirements ask for on this machine, each with an extra or none."""
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            yield name, ""
            for inner in requirement.extras:
                yield name, inner


def num_bytes(found: Distribution) -> int:
    """Add up the bytes of a distribution's existing files."""
    paths = (Path(str(file.locate())) for file in found.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())
