"""Tests of the names that users import from `baton`, also beside user files with equal names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import baton
import engine
from baton import LLM, own_packages

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[3]
OURS = "import os, sys, engine, models; print(os.path.dirname(os.path.dirname(engine.__file__)))"


def test_llm_is_the_engines() -> None:
    assert LLM is engine.LLM


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'baton' has no attribute 'nope'"):
        _ = baton.nope  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="nope"):
        exec("from baton import nope")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with files of our packages' names; who imports one is told so."""
    for name in own_packages.NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')\n")
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in the user's folder, which comes first on the path, too."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=project,
        env={"PYTHONPATH": f"{project}:{ROOT}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_file_of_the_user_takes_the_place_of_the_engine(project: Path) -> None:
    done = run(project, "-c", f"from baton import LLM; LLM.generate; {OURS}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT)
    assert f"{project}/models.py cannot be imported beside Baton" in done.stderr


def test_the_programs_run_no_file_of_the_user(project: Path) -> None:
    done = run(project, "-m", "baton", "router", "--help")
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["models.py", "models/user.py"])
def test_what_the_user_imported_before_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    # A folder gives way to a package; it can be imported where ours is not on the path yet.
    imported = f"import sys; path = sys.path; sys.path = [{str(tmp_path)!r}]; import models"
    done = run(tmp_path, "-c", f"{imported}; sys.path = path\nfrom baton import LLM")
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last == (
        f"ImportError: {tmp_path}/{name.removesuffix('/user.py')} was imported as 'models', "
        "the name of a package of Baton: rename it, or use Baton in a process of its own"
    )


def test_a_client_leaves_the_users_files_alone(tmp_path: Path) -> None:
    """Without `LLM`, none of our packages beside `baton` is imported: the names are the user's."""
    (tmp_path / "models.py").write_text("whose = 'mine'\n")
    done = run(tmp_path, "-c", "from baton import Client; import models; print(models.whose)")
    assert done.stdout.strip() == "mine", done.stderr


def test_every_package_of_the_distribution_is_found() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(name).name for name in packages} == {"baton", *own_packages.NAMES}
