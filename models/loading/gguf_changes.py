"""Undoes the changes of converters to GGUF, which gives the tensors of the original checkpoint.

`baton/checkpoint/gguf` names the changes of each tensor. A tensor of unexpected shape is returned
unchanged, because the loader will report its shape. Refuses to know: files, names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.checkpoint.gguf.architecture import Change
from models.config import ModelConfig
from models.recipe import DeltaNetSpec

# A function of a tensor, whose first axis is the rows, and of the model's configuration.
_Changer = Callable[[Tensor, ModelConfig], Tensor]


def needed(changes: Sequence[Change], config: ModelConfig) -> tuple[Change, ...]:
    """Return the changes that this model needs.

    With one value head per key head, converters do not reorder value heads.
    """
    net = _delta_net(config)
    if net is not None and net.num_key_heads == net.num_value_heads:
        return tuple(change for change in changes if change not in _OF_VALUE_HEADS)
    return tuple(changes)


def is_order(changes: Sequence[Change]) -> bool:
    """Return whether all changes only reorder rows."""
    return all(change in _ORDERS for change in changes)


def changed(tensor: Tensor, changes: Sequence[Change], config: ModelConfig) -> Tensor:
    """Apply changes to a tensor, in order; raises ValueError for impossible values."""
    for change in changes:
        tensor = (_ORDERS.get(change) or _VALUES[change])(tensor, config)
    return tensor


def joined(parts: Sequence[Tensor], changes: Sequence[Change], config: ModelConfig) -> Tensor:
    """Stack tensors along their rows, and apply changes; raises ValueError if shapes do not fit."""
    if Change.LATENTS in changes:
        return _latents(*parts)
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"parts of shapes {shapes} do not fit")
    whole = parts[0] if len(parts) == 1 else torch.cat([part.float() for part in parts])
    return changed(whole, changes, config)


def _delta_net(config: ModelConfig) -> DeltaNetSpec | None:
    mixers = (layer.mixer for layer in config.layers)
    return next((mixer for mixer in mixers if isinstance(mixer, DeltaNetSpec)), None)


def _query_halves(tensor: Tensor, config: ModelConfig) -> Tensor:
    return _halves_of_heads(tensor, config.num_heads, config.head_dim)


def _key_halves(tensor: Tensor, config: ModelConfig) -> Tensor:
    return _halves_of_heads(tensor, config.num_kv_heads, config.head_dim)


def _halves_of_heads(tensor: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Reorder each head's rows: first the first row of every pair, then the second rows.

    For example, rows ``0 1 2 3`` of the result are rows ``0 2 1 3`` of ``tensor``.
    """
    if tensor.shape[0] != num_heads * head_dim:
        return tensor
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _value_heads(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Reorder rows so that the value heads of one key head become adjacent."""
    net = _delta_net(config)
    if net is None or tensor.shape[0] % net.num_value_heads:
        return tensor
    per_key = net.num_value_heads // net.num_key_heads
    heads = tensor.reshape(per_key, net.num_key_heads, -1, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def _value_channels(tensor: Tensor, config: ModelConfig) -> Tensor:
    net = _delta_net(config)
    if net is None or tensor.shape[0] != net.num_channels:
        return tensor
    first = 2 * net.num_key_heads * net.key_dim
    return torch.cat([tensor[:first], _value_heads(tensor[first:], config)])


def _value_columns(tensor: Tensor, config: ModelConfig) -> Tensor:
    return _value_heads(tensor.t(), config).t().contiguous() if tensor.dim() == 2 else tensor


def _by_key_head(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Reorder rows ``| queries | keys | values | gates |``: rows of a key head become adjacent."""
    net = _delta_net(config)
    if net is None:
        return tensor
    keys, values = net.num_key_heads * net.key_dim, net.num_value_heads * net.value_dim
    if tensor.shape[0] != 2 * (keys + values):
        return tensor
    kinds = torch.split(tensor, [keys, keys, values, values])
    by_head = [kind.view(net.num_key_heads, -1, *tensor.shape[1:]) for kind in kinds]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def _less_one(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.float() - 1


def _log_of_decay(tensor: Tensor, config: ModelConfig) -> Tensor:
    if not bool((tensor < 0).all()):
        raise ValueError("must be below 0")
    return torch.log(-tensor.float())


def _channels(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor[:, None] if tensor.dim() == 2 else tensor


def _flat(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.flatten()


def _one_row(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor[None] if tensor.dim() == 1 else tensor


def _latents(*parts: Tensor) -> Tensor:
    """Join the two matrices that turn latents into keys and values.

    Args:
        parts: the matrix of keys, ``[num_heads, rank, key_dim]``, and the matrix of values,
            ``[num_heads, value_dim, rank]``.

    Returns:
        ``[num_heads * (key_dim + value_dim), rank]``.
    """
    keys, values = parts
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[::2]:
        shapes = f"{list(keys.shape)} and {list(values.shape)}"
        raise ValueError(f"parts of shapes {shapes} do not fit")
    return torch.cat([keys.transpose(1, 2).float(), values.float()], dim=1).flatten(0, 1)


_ORDERS: dict[Change, _Changer] = {
    Change.QUERY_HALVES: _query_halves,
    Change.KEY_HALVES: _key_halves,
    Change.VALUE_HEADS: _value_heads,
    Change.VALUE_CHANNELS: _value_channels,
    Change.BY_KEY_HEAD: _by_key_head,
}
_VALUES: dict[Change, _Changer] = {
    Change.LESS_ONE: _less_one,
    Change.LOG_OF_DECAY: _log_of_decay,
    Change.VALUE_COLUMNS: _value_columns,
    Change.CHANNELS: _channels,
    Change.FLAT: _flat,
    Change.ONE_ROW: _one_row,
}
_OF_VALUE_HEADS = (Change.VALUE_HEADS, Change.VALUE_CHANNELS, Change.VALUE_COLUMNS)
