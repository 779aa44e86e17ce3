"""Opens new weights for an engine in this process: from a folder, a file, a hub id, or tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from baton.api.errors import InvalidRequestError
from baton.checkpoint.new_weights import NewWeights, open_weights_of, write_weights

WeightsSource = str | Path | Iterable[tuple[str, Tensor]]


def open_source(source: WeightsSource, served: Path) -> NewWeights:
    """Open a source of new weights; tensors are first written to a file in the temporary folder.

    Args:
        source: a model folder, a folder or a file of safetensors, a GGUF file, a hub id, or all
            tensors of the checkpoint with their names, on any device.
        served: folder of the model that the engine runs.

    Raises:
        InvalidRequestError: the source has no weights, or has weights of another model.
    """
    if isinstance(source, str | Path):
        return open_weights_of(source, served)
    return write_weights(lambda path: _write(source, path), served)


def _write(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    found: dict[str, Tensor] = {}
    memories = set[int]()
    for name, tensor in tensors:
        if name in found:
            raise InvalidRequestError("weights", f"{name}: is given twice")
        on_host = tensor.detach().cpu().contiguous()
        memory = on_host.untyped_storage().data_ptr()
        # Copy tensors that share memory, such as an output head tied to the embedding: safetensors
        # refuses to store these.
        found[name] = on_host.clone() if memory in memories else on_host
        memories.add(memory)
    try:
        save_file(found, path, metadata={"format": "pt"})
    except (SafetensorError, RuntimeError) as error:
        raise InvalidRequestError("weights", f"cannot be written: {error}") from error
