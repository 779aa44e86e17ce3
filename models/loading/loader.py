"""Loads weights from files into a module, layer by layer, never holding two copies of the model.

The module is built on the meta device (shapes only). A checkpoint must have exactly the module's
tensors. Each tensor is read when it is needed, into a parameter or into a packer's format.
`stored_weights.py`, `quantized_weights.py` and `gguf_weights.py` read the files.
Refuses to know: architectures, pickled checkpoints (they run code).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.folder import WEIGHTS
from baton.checkpoint.gguf.folder import weight_files as gguf_files
from baton.checkpoint.model_folder import MODELOPT_FILE
from baton.checkpoint.weights_cache import CacheEntry, WeightsCache, WeightsCacheError
from baton_kernels import ALL_EXPERTS, Float8Rows, GroupedIntegers
from baton_kernels.ops import Ops
from models.base import CausalLM
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.fields import Fields
from models.layers.attention import Attention
from models.layers.computing import use_ops
from models.layers.embedding import LayerEnd
from models.layers.latent_attention import LatentAttention
from models.layers.linear import JoinedLinear
from models.layers.moe import SparseMoe
from models.layers.norm import RMSNorm
from models.loading.fused_experts import split_fused_experts
from models.loading.gguf_weights import read_gguf
from models.loading.quantized_weights import read_quantized
from models.loading.stored_weights import StoredTensor, WeightPart, open_safetensors
from models.loading.text_parts import text_tensors, with_prefix, with_vision_names
from models.parallel.group import ALONE, Ranks
from models.parallel.shards import Kept, KeptParts
from models.vision.encoders import make_encoder

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Suffixes of tensors in old checkpoints that are ignored, because every model computes them.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN_NAMES = 3
# Name of a float8 KV cache's scale within a layer's attention -> attribute; a scale is one number.
_SCALES = {
    **dict.fromkeys(("k_scale", "attn.k_scale", "k_proj.k_scale"), "k_scale"),
    **dict.fromkeys(("v_scale", "attn.v_scale", "v_proj.v_scale"), "v_scale"),
}


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    packer: WeightPacker | None = None,
    ops: Ops | None = None,
    ranks: Ranks = ALONE,
    cache: WeightsCache | None = None,
    images: bool = False,
) -> CausalLM:
    """Load a model from a folder with config.json and weights (safetensors or GGUF).

    Args:
        folder: a local folder as ``save_pretrained`` writes it.
        dtype: type of weights and activations; None: the checkpoint's own.
        device: device of the weights.
        max_model_len: longest sequence to serve, in tokens; None: see ``ModelConfig.from_folder``.
        packer: stores linear layers in another form, for example ``models.cpu.packing.CpuPacker``;
            None: torch parameters.
        ops: kernels that compute the layers; None: the fastest kernels for the device.
        ranks: the ranks that share the model, of which each loads its part; by default, there is
            one rank, which loads the whole model.
        cache: keeps packed weights in files that processes share; None: no files are kept.
        images: whether to load the vision encoder of a model that has one, too.

    Raises:
        ModelLoadError: the folder is missing, incomplete, broken or not supported; one line that
            names the file and the field or tensor.
    """
    path = Path(folder)
    config = ModelConfig.from_folder(path, max_model_len=max_model_len, images=images)
    with on_meta_device():
        model = DecoderForCausalLM(config)
        if config.vision is not None:
            model.vision = make_encoder(config.vision, config.hidden_size)
        whole = _Names([name for name, _ in _checkpoint_parameters(model)], [*_kv_scales(model)])
        if ranks.everyone.size > 1:
            model.shard(ranks)
            _log_experts(model, ranks)
    dtype = dtype or getattr(torch, config.dtype)
    if config.quantization is not None:
        kind, method = str(dtype).removeprefix("torch."), config.quantization.method
        other = "" if packer is None else ", but for integers and float8 that kernels multiply"
        logger.info("weights are stored as %s, and are kept in %s%s", method, kind, other)
    with ExitStack() as files:
        stored = open_weights(path, config, files)
        stored = with_prefix(stored, config.recipe.stored_prefix, frozenset(whole.places))
        if (experts := config.experts) is not None:
            stored = split_fused_experts(
                stored,
                experts.num_experts,
                model.checkpoint_name,
                by_turns=experts.stored_by_turns,
                as_linears=experts.stored_as_linears,
                sizes=(config.hidden_size, experts.inner_size)
                if experts.stored_both_ways
                else None,
            )
        _check_names(path, stored, whole, [name for name in stored if model.ignores_weight(name)])
        entry = None
        if cache is not None and packer is not None:
            entry = _hold_entry(cache, path, model, packer, ranks, files)
        _load_weights(model, path, stored, dtype, torch.device(device), packer, entry)
    if ops is not None:
        use_ops(model, ops)
    return model.to(device).eval().requires_grad_(requires_grad=False)


def _log_experts(model: DecoderForCausalLM, ranks: Ranks) -> None:
    """Log how the ranks of a stage divide the experts, if there are experts."""
    layers = [one for one in model.modules() if isinstance(one, SparseMoe)]
    if not layers or ranks.group.size == 1:
        return
    num_whole = sum(one.share != ALL_EXPERTS for one in layers)
    text = "%d of %d layers with experts have whole experts on each of %d ranks"
    logger.info(text, num_whole, len(layers), ranks.group.size)


def _hold_entry(
    cache: WeightsCache,
    folder: Path,
    model: DecoderForCausalLM,
    packer: WeightPacker,
    ranks: Ranks,
    files: ExitStack,
) -> CacheEntry | None:
    """Hold the model's entry in the cache of packed weights until ``files`` is closed.

    Returns None if packed weights of this model cannot be cached, or the model is too small.
    """
    sources = gguf_files(folder) or _weight_files(folder)
    size = sum(path.stat().st_size for path in sources)
    if packer.cache_key is None or not cache.takes(size):
        return None
    everyone, group = ranks.everyone, ranks.group
    experts = [item for item in model.named_modules() if isinstance(item[1], SparseMoe)]
    packing = [
        packer.cache_key,
        *(_content_digest(folder / name) for name in ("config.json", MODELOPT_FILE)),
        *(f"{name} {list(one.shape)}" for name, one in model.named_parameters()),
        f"{everyone.rank} {everyone.size} {group.rank} {group.size} {ranks.stage}",
        *(f"{name} {one.share}" for name, one in experts if one.share != ALL_EXPERTS),
    ]
    try:
        return files.enter_context(cache.hold(sources, "\n".join(packing)))
    except WeightsCacheError as error:
        logger.info("packed weights are not shared with other processes: %s", error)
        return None


def _content_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


@contextlib.contextmanager
def on_meta_device() -> Iterator[None]:
    """Enter a context in which modules are created without memory for weights."""
    with torch.device("meta"), _NoInitialWeights():
        yield


def fill_model(
    model: DecoderForCausalLM,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    packer: WeightPacker | None,
    ops: Ops | None = None,
) -> None:
    """Load tensors into a model that was made on the meta device.

    Raises ModelLoadError if a tensor is missing or has the wrong shape.
    """
    missing = [name for name, _ in _checkpoint_parameters(model) if name not in stored]
    if missing:
        raise ModelLoadError(f"{folder}: weights are missing: {_first_of(missing)}")
    _load_weights(model, folder, stored, dtype, device, packer, None)
    if ops is not None:
        use_ops(model, ops)
    model.to(device).eval().requires_grad_(requires_grad=False)


class _NoInitialWeights(TorchFunctionMode):
    """A torch mode that skips random initialization of weights, which loading overwrites.

    On the meta device, random initialization would import torch's compiler, which takes longer than
    loading a small model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


class PackingModel(Protocol):
    """The linear layers of one model, while a packer packs them.

    Attributes:
        takes_float8: whether `take` accepts weights stored in float8.
    """

    takes_float8: bool

    def take_kept(self, owner: nn.Module) -> bool:
        """Use the packed weight of ``owner`` from the cache; return whether the cache has one."""

    def take(self, owner: nn.Module, parts: Sequence[WeightPart]) -> bool:
        """Pack the rows of ``owner.weight``; return whether they were packed."""

    def finish(self) -> None:
        """Put packed layers in place of the layers whose weights were packed."""


class WeightPacker(Protocol):
    """A packer, which keeps linear layers in another form than torch parameters."""

    @property
    def cache_key(self) -> str | None:
        """Return a text that names all that packed weights depend on; None: never cache them."""

    def start(self, model: DecoderForCausalLM, entry: CacheEntry | None = None) -> PackingModel:
        """Start packing a model that has no weights yet.

        Args:
            entry: the model's entry in the user's cache of packed weights; None: do not cache.
        """


def pack_loaded(packer: WeightPacker, model: CausalLM) -> None:
    """Pack a model that was loaded without a packer."""
    assert isinstance(model, DecoderForCausalLM)
    packing = packer.start(model)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            packing.take(module, [WeightPart(0, module.weight)])
    packing.finish()


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a checkpoint's tensor in the model: some or all rows of a parameter."""

    owner: nn.Module
    attribute: str
    rows: slice
    kept: Kept | None = None  # the part of the tensor to load; None: all of it

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the checkpoint's tensor must have."""
        parameter: nn.Parameter = getattr(self.owner, self.attribute)
        return tuple(parameter[self.rows].shape) if self.kept is None else self.kept.shape


def _checkpoint_parameters(model: DecoderForCausalLM) -> Iterator[tuple[str, _Place]]:
    """Yield the checkpoint's name and the place of every tensor that a checkpoint must have.

    A tensor that is loaded to several places is yielded once for each place.
    """
    rename = model.checkpoint_name
    for path, module in model.named_modules():
        parts: KeptParts = getattr(module, "kept", {})
        for attribute, _ in module.named_parameters(recurse=False):
            if isinstance(module, JoinedLinear) and not module.stored_joined:
                parent = path.rpartition(".")[0]
                for part, rows in module.part_rows():
                    kept = parts.get(f"{part}.{attribute}")
                    order = module.row_order(part)
                    if kept is None and order is not None:
                        shape = getattr(module, attribute).shape[1:]
                        kept = Kept((module.stored_rows(part), *shape), order)
                    place = _Place(module, attribute, rows, kept)
                    stored = module.stored_name(part)
                    yield rename(f"{parent}.{stored}.{attribute}"), place
            else:
                place = _Place(module, attribute, slice(None), parts.get(attribute))
                yield rename(f"{path}.{attribute}"), place


class _Names(NamedTuple):
    """Names of all tensors in the whole model's checkpoint, including tensors of other ranks."""

    places: Sequence[str]
    scales: Sequence[str]  # optional


def _kv_scales(model: DecoderForCausalLM) -> dict[str, tuple[Attention | LatentAttention, str]]:
    """Return, by checkpoint name, the layer and the attribute to which each KV scale belongs."""
    return {
        model.checkpoint_name(f"{path}.{name}"): (module, attribute)
        for path, module in model.named_modules()
        if isinstance(module, Attention | LatentAttention)
        for name, attribute in _SCALES.items()
    }


def _load_weights(
    model: DecoderForCausalLM,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    packer: WeightPacker | None,
    entry: CacheEntry | None,
) -> None:
    _check_shapes(model, stored)
    model.model.dtype = dtype
    places, scales = _checkpoint_parameters(model), _kv_scales(model)
    if model.config.tie_word_embeddings and _HEAD in stored:
        _check_tied(folder, stored, model.checkpoint_name(_EMBED))
    for name in scales.keys() & stored.keys():
        owner, attribute = scales[name]
        setattr(owner, attribute, _read_scale(stored[name]))
    packing = None if packer is None else packer.start(model, entry)
    by_parameter = groupby(places, lambda item: (item[1].owner, item[1].attribute))
    for (owner, attribute), of_owner in by_parameter:
        packs = packing is not None and attribute == "weight"
        if packing is not None and packs and packing.take_kept(owner):
            continue
        float8 = packing is not None and packing.takes_float8 and packs
        parts = [
            _read_part(stored[name], place, integers=packs, float8=float8)
            for name, place in of_owner
        ]
        if packing is None or not packs or not packing.take(owner, parts):
            _fill_parameter(owner, attribute, parts, dtype, device)
    if packing is not None:
        packing.finish()


def _check_names(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    model: _Names,
    ignored: Sequence[str],
) -> None:
    """Raise ModelLoadError if tensors of the model are missing, or unknown tensors are there."""
    if ignored:
        logger.info("not loaded, as nothing reads them: %s", _first_of(ignored))
    missing = [name for name in model.places if name not in stored]
    if missing:
        raise ModelLoadError(f"{folder}: weights are missing: {_first_of(missing)}")
    known = {*model.places, *model.scales, *ignored, _HEAD}
    unknown = [
        f"{name} in {one.path.name}"
        for name, one in stored.items()
        if name not in known and not name.endswith(_IGNORED_SUFFIXES)
    ]
    if unknown:
        raise ModelLoadError(f"{folder}: weights unknown to the model: {_first_of(unknown)}")


def _check_shapes(model: DecoderForCausalLM, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ModelLoadError if a tensor has a wrong shape, before any tensor is read."""
    for name, place in _checkpoint_parameters(model):
        if (found := stored[name].shape) is not None and found != place.shape:
            raise _wrong_shape(stored[name], found, place.shape)


def _wrong_shape(
    stored: StoredTensor, found: Sequence[int], expected: Sequence[int]
) -> ModelLoadError:
    problem = f"shape {list(found)}, but config.json means {list(expected)}"
    return ModelLoadError(f"{stored.path}: {stored.name}: {problem}")


def _read_part(stored: StoredTensor, place: _Place, *, integers: bool, float8: bool) -> WeightPart:
    kept: GroupedIntegers | Float8Rows | None = None
    if integers and stored.read_integers is not None:
        kept = stored.read_integers()
    if kept is None and float8 and stored.read_float8 is not None:
        kept = stored.read_float8()
    first_row = place.rows.start or 0
    part = WeightPart(first_row, kept or stored.read(), stored.is_mapped)
    if tuple(part.shape) != place.shape:
        raise _wrong_shape(stored, part.shape, place.shape)
    if isinstance(part.content, Tensor) and part.content.dtype not in _FLOATS:
        kind = str(part.content.dtype).removeprefix("torch.")
        problem = f"dtype {kind} is not supported (quantized weights?)"
        raise ModelLoadError(f"{stored.path}: {stored.name}: {problem}")
    return part if place.kept is None else _keep(part, place.kept)


def _keep(part: WeightPart, kept: Kept) -> WeightPart:
    if not isinstance(part.content, Tensor):
        content = part.content.part(kept.rows, kept.columns)
        if content is not None:
            return WeightPart(part.first_row, content)
    return WeightPart(part.first_row, kept.of(part.tensor))


def _fill_parameter(
    owner: nn.Module,
    attribute: str,
    parts: Iterable[WeightPart],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Make a parameter from copies of its rows; views would keep the file's pages in memory."""
    shape = getattr(owner, attribute).shape
    if attribute in getattr(owner, "float32_parameters", ()):
        dtype = torch.float32
    weight = torch.empty(shape, device=device, dtype=dtype)
    for part in parts:
        for first_row, rows in part.pieces():
            weight[first_row : first_row + len(rows)].copy_(rows)
    if isinstance(owner, RMSNorm | Attention | LayerEnd):
        weight = owner.keep_loaded(weight)
    setattr(owner, attribute, nn.Parameter(weight, requires_grad=False))


def open_weights(folder: Path, config: ModelConfig, files: ExitStack) -> dict[str, StoredTensor]:
    """Open a folder's tensors, under their names in Hugging Face layout."""
    gguf = folder / WEIGHTS
    if gguf.exists():
        return {stored.name: stored for stored in read_gguf(gguf, config)}
    tensors = open_safetensors(_weight_files(folder), files)
    if config.quantization is not None:
        # Read quantized tensors before renaming, because the file's names find them.
        tensors = {one.name: one for one in read_quantized(tensors, config.quantization)}
    if config.is_text_part:
        return text_tensors(tensors, images=config.vision is not None)
    return tensors if config.vision is None else with_vision_names(tensors)


def _weight_files(folder: Path) -> list[Path]:
    """List the safetensors files: the single file, or else all files that the index names."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise ModelLoadError(f"{folder}: no weights: neither {_SINGLE} nor {_INDEX}")
    weight_map = Fields.from_file(index).child("weight_map")
    shards = sorted({weight_map.text(name) for name in weight_map.names()})
    for shard in shards:
        # a path with folders could lead to any file of this machine
        if Path(shard).name != shard:
            raise ModelLoadError(f"{index}: weight_map: {shard!r} is not a file name")
        if not (folder / shard).exists():
            raise ModelLoadError(f"{folder / shard}: missing, but {_INDEX} names it")
    return [folder / shard for shard in shards]


def _read_scale(stored: StoredTensor) -> float:
    """Read the scale of a float8 KV cache's keys or values; raises ModelLoadError."""
    tensor = stored.read()
    scale = float(tensor) if tensor.numel() == 1 else math.nan
    if not 0 < scale < math.inf:
        found = scale if tensor.numel() == 1 else f"shape {list(tensor.shape)}"
        problem = f"must be one number above 0, got {found}"
        raise ModelLoadError(f"{stored.path}: {stored.name}: {problem}")
    return scale


def _check_tied(folder: Path, stored: Mapping[str, StoredTensor], embed: str) -> None:
    """Raise ModelLoadError if the head differs from the embedding although they are tied."""
    head = WeightPart(0, stored[_HEAD].read(), stored[_HEAD].is_mapped)
    embedding = stored[embed].read()

    def is_embedding(first_row: int, rows: Tensor) -> bool:
        return torch.equal(rows.to(embedding), embedding[first_row : first_row + len(rows)])

    same = head.shape == embedding.shape
    if not (same and all(is_embedding(first_row, rows) for first_row, rows in head.pieces())):
        problem = f"differs from {embed} although tie_word_embeddings is true"
        raise ModelLoadError(f"{folder}: {_HEAD}: {problem}")


def _first_of(names: Iterable[str]) -> str:
    ordered = list(names)
    more = len(ordered) - _SHOWN_NAMES
    shown = ", ".join(ordered[:_SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
