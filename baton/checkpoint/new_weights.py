"""New weights: a folder with the configuration of a served model and the weights of another source.

    served folder    config.json, tokenizer.json, ...    ──┐
    source           model.safetensors, or a GGUF file   ──┴──> links in a temporary folder

An engine loads such a folder as it loads a model at start, so that both give the same numbers.
Refuses to know: tensors, engines.
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
# Identity entries in which a source with configuration files must equal the served model.
_SHARED = ("model", "tokenizer", "chat_template", "generation_config")


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The weights of one source, in a folder that an engine can load.

    Attributes:
        folder: the folder.
        digest: digest of the weights: their version.
        source: the source as users named it, for messages.
        is_kept: whether the files stay after `close`.
    """

    folder: Path
    digest: str
    source: str
    is_kept: bool = True
    _held: HeldFolder | None = None

    def close(self) -> None:
        """Remove the temporary folder, if there is one."""
        if self._held is not None:
            self._held.close()


def served_weights(folder: Path) -> NewWeights:
    """Describe the weights of a model folder that is served as it is; raises ModelLoadError."""
    return NewWeights(folder, weights_digest(folder), str(folder))


def open_weights_of(source: str | Path, served: Path) -> NewWeights:
    """Make the folder of a source on this machine, or on the hub.

    Args:
        source: a model folder, a folder or a file of safetensors, a GGUF file, or a hub id.
        served: the served model's folder.

    Raises:
        InvalidRequestError: there are no weights, or they belong to another model.
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
    """Make the folder of weights that a function writes to a safetensors file.

    Args:
        write: writes the file, whose path is given; raises InvalidRequestError.
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
    """Yield the weights files of a source, and their names in a model folder."""
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
    """Raise InvalidRequestError if configuration or tokenizer are not the served model's."""
    theirs, ours = folder_identity(folder), folder_identity(served)
    for key in _SHARED:
        if theirs[key] not in (NONE, ours[key]):
            problem = f"{source}: {key} differs from the served model's; serve it as another model"
            raise InvalidRequestError("weights", problem)


def _has_weights(path: Path) -> bool:
    return path.suffix == _SUFFIX or path.name in (_INDEX, GGUF_WEIGHTS)
