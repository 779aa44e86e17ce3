"""Tests of the lock's rules, and of the problems found if it breaks them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tools.supply_chain import UNLOCKED, lock_findings, read_lock, requirements_of

ROOT = Path(__file__).parents[3]
HASH = f"    --hash=sha256:{'0' * 64}"


def pyproject(*dependencies: str, dev: str = "") -> dict[str, object]:
    optional = {"dev": [dev] if dev else [], "node": ["safetensors>=0.5"]}
    project = {"name": "it", "dependencies": list(dependencies), "optional-dependencies": optional}
    return {"project": project}


def test_the_lock_of_this_project_holds_what_it_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = read_lock((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    assert len(pins) > 50
    assert list(lock_findings(project, pins)) == []


@pytest.mark.parametrize(("image", "extras"), [("router", []), ("node", ["node", "images", "s3"])])
def test_the_lock_of_an_image_holds_the_extras_that_the_image_is_for(
    image: str, extras: list[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    project["optional-dependencies"]["of-image"] = [f"{project['name']}[{','.join(extras)}]"]
    pins = read_lock((ROOT / "deploy" / "docker" / f"{image}.lock").read_text(encoding="utf-8"))
    for requirement in requirements_of(project, "of-image"):
        name = canonicalize_name(requirement.name)
        assert name in UNLOCKED or all(map(requirement.specifier.contains, pins[name])), name


def test_a_pin_without_a_hash_is_refused() -> None:
    assert read_lock(f"a==1.0 \\\n{HASH}") == {"a": read_lock(f"A==1.0 \\\n{HASH}")["a"]}
    with pytest.raises(ValueError, match="b has no hash"):
        read_lock(f"a==1.0 \\\n{HASH}\nb==2.0 \\\nc==3.0 \\\n{HASH}")


@pytest.mark.parametrize(
    ("project", "found"),
    [
        (pyproject("a>=1"), []),
        (pyproject("a>=2"), ["requirements.lock: holds 1.5 for a>=2; run `make lock`"]),
        (pyproject("A-b>=1"), ["requirements.lock: holds nothing for A-b>=1; run `make lock`"]),
        (
            pyproject(dev="it[node]"),
            ["requirements.lock: holds nothing for safetensors>=0.5; run `make lock`"],
        ),
        (pyproject("torch>=2"), []),
    ],
)
def test_what_the_lock_lacks_is_named(project: dict[str, object], found: list[str]) -> None:
    assert list(lock_findings(project, read_lock(f"a==1.5 \\\n{HASH}"))) == found
