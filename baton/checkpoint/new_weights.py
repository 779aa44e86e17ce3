"""New weights: makes a folder with a served model's configuration and another source's weights.

    served folder    config.json, tokenizer.json, ...    ──┐
    source           model.safetensors, or a GGUF file   ──┴──> links in a temporary folder

An engine loads such a folder just as it loads a model at its start, so the outputs are the same as
after a start with these weights. Refuses to know: tensors, engines.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.api.errors import InvalidRequestError, ModelLoadError, reason_of
from baton.checkpoint.gguf.folder import WEIGHTS as GGUF_WEIGHTS
from baton.checkpoint.gguf.parts import linked
from baton.checkpoint.model_folder import find_model_folder, weights_digest
from baton.checkpoint.model_identity import NONE, folder_identity
from baton.processes.held_folder import HeldFolder

PREFIX = "baton-weights-"
SINGLE = "model.safetensors"
_SUFFIX, _INDEX = ".safetensors", "model.safetensors.index.json"
# Entries of the model identity that must be equal if the source has a config.json, too.
_SHARED = ("model", "tokenizer", "chat_template", "generation_config")


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The weights of one source, in a folder that an engine can load.

    Attributes:
        folder: folder with the weights and the served model's configuration.
        digest: digest of the weights, which names their version.
        source: name of the source as the user gave it, for messages.
        is_kept: whether the source's files stay after `close`; otherwise `close` removes the
            weights.
    """

    folder: Path
    digest: str
    source: str
    is_kept: bool = True
    _held: HeldFolder | None = None

    def close(self) -> None:
        """Remove the temporary folder, if one was made for these weights."""
        if self._held is not None:
            self._held.close()


def served_weights(folder: Path) -> NewWeights:
    """Describe the weights of a model folder that is served as it is; raises ModelLoadError."""
    return NewWeights(folder, weights_digest(folder), str(folder))


def open_weights_of(source: str | Path, served: Path) -> NewWeights:
    """Make a folder with the weights of a source, which is on this machine or on the hub.

    Args:
        source: a model folder, a folder or a file of safetensors, a GGUF file, or a hub id.
        served: the served model's folder.

    Raises:
        InvalidRequestError: the source has no weights, or weights of another model.
    """
    try:
        files = list(_files_of(Path(source).expanduser(), str(source), served))
    except ModelLoadError as error:
        raise InvalidRequestError("weights", str(error)) from error

    def link(folder: Path) -> None:
        for name, path in files:
            (folder / name).symlink_to(path)

    return _make(served, link, str(source), is_kept=True)


def write_weights(write: Callable[[Path], None], served: Path) -> NewWeights:
    """Make a folder with weights that a function writes to a safetensors file.

    Args:
        write: writes the file to the path that it gets; raises InvalidRequestError.
        served: the served model's folder.
    """
    return _make(served, lambda folder: write(folder / SINGLE), "the given tensors", is_kept=False)


def _make(
    served: Path, add_weights: Callable[[Path], None], source: str, *, is_kept: bool
) -> NewWeights:
    try:
        held = HeldFolder(PREFIX)
    except OSError as error:
        problem = f"no temporary folder can be made: {reason_of(error)}"
        raise InvalidRequestError("weights", problem) from error
    atexit.register(held.close)
    try:
        for path in served.iterdir():
            if not _has_weights(path):
                (held.path / path.name).symlink_to(path.absolute())
        add_weights(held.path)
        return NewWeights(held.path, weights_digest(held.path), source, is_kept, held)
    except OSError as error:
        held.close()
        problem = f"{source}: cannot be written: {reason_of(error)}"
        raise InvalidRequestError("weights", problem) from error
    except BaseException:
        held.close()
        raise


def _files_of(path: Path, source: str, served: Path) -> Iterator[tuple[str, Path]]:
    """Yield for each weights file of a source its name in a model folder, and its path."""
    if path.is_file() and path.suffix == _SUFFIX:
        yield SINGLE, path.absolute()
        return
    folder = path
    if not (path.is_dir() and any(path.glob(f"*{_SUFFIX}"))):
        folder = find_model_folder(source)
    if (folder / "config.json").is_file():
        _check_same_model(folder, source, served)
    gguf = folder / GGUF_WEIGHTS
    if gguf.exists():
        yield GGUF_WEIGHTS, linked(gguf)
        return
    for one in sorted(folder.iterdir()):
        if _has_weights(one):
            yield one.name, one.absolute()


def _check_same_model(folder: Path, source: str, served: Path) -> None:
    """Raise InvalidRequestError if the source's configuration or tokenizer is of another model."""
    theirs, ours = folder_identity(folder), folder_identity(served)
    for key in _SHARED:
        if theirs[key] not in (NONE, ours[key]):
            problem = f"{source}: {key} differs from the served model's; serve it as another model"
            raise InvalidRequestError("weights", problem)


def _has_weights(path: Path) -> bool:
    return path.suffix == _SUFFIX or path.name in (_INDEX, GGUF_WEIGHTS)
