"""CpuPacker: packs the weights of linear layers for CPU kernels, while they are loaded.

Rows go from the checkpoint's file directly into panels (blocks of adjacent outputs, in the order
that a kernel reads), and never become a torch parameter.
Refuses to know: architectures, files, how a packed product is computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from baton.checkpoint.weights_cache import CacheEntry, WeightsCacheError
from baton_kernels import CodeLayout, Float8Rows, WeightFormat, reference
from baton_kernels.dispatch import native_ops
from baton_kernels.huge_pages import WeightMemory
from baton_kernels.native.ops import NativeOps
from baton_kernels.ops import Ops
from models.cpu.decode_tapes import DecodeTapes
from models.cpu.kept_weights import Kept, machine_key, read_kept, write_kept
from models.decoder import DecoderForCausalLM
from models.layers.embedding import NarrowEmbedding, PackedEmbedding
from models.layers.latent_attention import LatentProjection, PackedLatentProjection
from models.layers.linear import ExactLinear, ExpertsLinear, GatedLinear, PackedLinear
from models.loading.stored_weights import WeightPart, float8_alike, integers_alike
from models.loading.text_parts import VISION

logger = logging.getLogger(__name__)

_MIB = 2**20
# Formats that raise small models' perplexity by several percent (log, 2026-11-28). Output heads use
# INT8 instead of these formats.
_COARSE = (WeightFormat.INT4, WeightFormat.FP8)
_FEW_WEIGHTS = 10**9
_ROWS = 64  # rows of a weight that `_is_bfloat16` checks together
_WIDTH = 16  # outputs in a panel if there are no native kernels
# Suffixes of a layer's name in files of packed weights: keys and values of a projection of latents,
# and an embedding kept in 16 bits.
_KEYS, _VALUES, _NARROW = ".keys", ".values", ".narrow"
_COARSE_KEY = "coarse"


@dataclass(frozen=True, slots=True)
class CpuPacker:
    """A ``WeightPacker`` for CPUs; equal packers pack a model equally.

    Attributes:
        dtype: the dtype in which the model computes.
        weights: format of all linear layers; None: the checkpoint's format if kernels support it,
            else ``dtype``. With ``INT4`` and ``FP8``, the head is ``INT8``, because it suffers most
            from low precision.
        native: the native kernels that will read the weights; None: kernels written in torch will.
    """

    dtype: torch.dtype
    weights: WeightFormat | None
    native: NativeOps | None

    @classmethod
    def choose(
        cls, dtype: torch.dtype, weights: str, *, native_kernels: bool = True
    ) -> CpuPacker | None:
        """Choose a packer; return None if packing would not make the model faster.

        Args:
            dtype: type that the model computes in.
            weights: ``auto``, or a ``WeightFormat``.
            native_kernels: whether the model may compute with native kernels.
        """
        native = native_ops() if native_kernels else None
        asked = None if weights == "auto" else WeightFormat(weights)
        if asked is None and (native is None or WeightFormat.of(dtype) is None):
            return None
        return cls(dtype, asked, native)

    @property
    def width(self) -> int:
        """Return the number of outputs in a panel."""
        return _WIDTH if self.native is None else self.native.panel_width

    @property
    def cache_key(self) -> str:
        """Return a text that names all that packed weights depend on."""
        kernels = "native" if self.native else "reference"
        return f"{self.dtype} {self.weights} {self.width} {kernels} {machine_key()}"

    def start(self, model: DecoderForCausalLM, entry: CacheEntry | None = None) -> _Packing:
        """Start packing a model that has no weights yet."""
        return _Packing(self, model, entry)


class _Packing:
    """Packs one model's linear layers for a CPU; a ``PackingModel``."""

    def __init__(
        self, packer: CpuPacker, model: DecoderForCausalLM, entry: CacheEntry | None
    ) -> None:
        self._packer = packer
        self._ops: Ops = packer.native or reference
        self.takes_float8 = packer.weights in (None, WeightFormat.FP8)
        self._model = model
        self._packed: dict[nn.Module, ops.PackedWeight] = {}
        self._latents: dict[nn.Module, PackedLatentProjection] = {}
        self._embeddings: dict[nn.Module, NarrowEmbedding | PackedEmbedding] = {}
        self._memory = WeightMemory()
        self._num_coarse = 0  # number of weights that this packer rounded to a coarse format
        self._names = {module: name for name, module in model.named_modules()}
        self._entry = entry
        self._kept: Kept = {}
        if entry is not None and self._map_kept(entry):
            self._entry = None  # `finish` need not write what is mapped from a file

    def take_kept(self, owner: nn.Module) -> bool:
        """Use the packed weight of ``owner`` from the cache; return whether the cache has one."""
        name = self._names[owner]
        found, keys, values = map(self._kept.get, (name, name + _KEYS, name + _VALUES))
        if isinstance(keys, ops.PackedWeight) and isinstance(values, ops.PackedWeight):
            self._latents[owner] = PackedLatentProjection(keys, values)
        elif isinstance(found, ops.PackedWeight):
            self._packed[owner] = found
            if owner is self._model.model.embed_tokens:
                self._embeddings[owner] = PackedEmbedding(found, self._packer.dtype)
        elif isinstance(found, Tensor):
            owner.weight = nn.Parameter(found, requires_grad=False)
        elif isinstance(narrow := self._kept.get(name + _NARROW), Tensor):
            self._embeddings[owner] = NarrowEmbedding(narrow, self._packer.dtype)
        else:
            return False
        return True

    def _map_kept(self, entry: CacheEntry) -> bool:
        """Map the entry's file of packed weights; return whether there is one."""
        file = entry.open()
        if file is None:
            return False
        self._kept, more = read_kept(file)
        self._num_coarse = more[_COARSE_KEY]
        self._model.mapped_bytes = file.data_bytes
        logger.info("packed weights are shared: %.0f MiB", file.data_bytes / _MIB)
        return True

    def _share(self, entry: CacheEntry) -> None:
        """Write all packed weights to a file, map the file, and drop the originals."""
        names = self._names
        embeddings = [one for one in names if self._is_text_embedding(one)]
        kept: dict[str, ops.PackedWeight | Tensor] = {
            names[owner]: weight for owner, weight in self._packed.items()
        }
        for owner, latents in self._latents.items():
            kept[names[owner] + _KEYS], kept[names[owner] + _VALUES] = latents.packed
        for embedding in embeddings:
            replaced = self._embeddings.get(embedding)
            if isinstance(replaced, NarrowEmbedding):
                kept[names[embedding] + _NARROW] = replaced.weight
            elif replaced is None:
                kept[names[embedding]] = embedding.weight
        try:
            write_kept(entry, kept, {_COARSE_KEY: self._num_coarse})
            if not self._map_kept(entry):
                return
        except WeightsCacheError as error:
            logger.info("packed weights are not shared with other processes: %s", error)
            return
        self._memory = WeightMemory()  # frees the originals' memory
        for owner in (*self._packed, *self._latents, *embeddings):
            self.take_kept(owner)

    def take(self, owner: nn.Module, parts: Sequence[WeightPart]) -> bool:
        """Pack a layer's weight, and a tied embedding as the output head; return whether packed."""
        if self._is_text_embedding(owner):
            return self._take_embedding(owner, parts)
        if not isinstance(owner, nn.Linear):
            return False
        if isinstance(owner, LatentProjection):
            self._latents[owner] = self._pack_latents(owner, parts)
        elif isinstance(owner, ExactLinear) or self._names[owner].startswith(VISION):
            self._packed[owner] = self._pack_as(self._exact_format(parts), parts)
        elif isinstance(owner, ExpertsLinear) and owner.part_sizes[0] % self._packer.width:
            parts = list(_spread(parts, owner.part_sizes[0], self._packer.width))
            self._packed[owner] = self._pack(parts, has_gaps=True)
        else:
            self._packed[owner] = self._pack(parts, is_head=owner is self._model.lm_head)
        return True

    def _is_text_embedding(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding) and not self._names[module].startswith(VISION)

    def _take_embedding(self, owner: nn.Module, parts: Sequence[WeightPart]) -> bool:
        """Pack a tied embedding as the head; keep others in bfloat16 if that is exact."""
        if self._model.lm_head is None and owner is self._model.model.embed_tokens:
            self._packed[owner] = weight = self._pack(parts, is_head=True)
            self._embeddings[owner] = PackedEmbedding(weight, self._packer.dtype)
            return True
        if self._packer.dtype != torch.float32 or not all(map(_is_bfloat16, parts)):
            return False
        self._embeddings[owner] = NarrowEmbedding(_narrow(parts), self._packer.dtype)
        return True

    def finish(self) -> None:
        """Put packed layers in place of the original ones; write newly packed weights to a file."""
        if self._entry is not None:
            self._share(self._entry)
        model, decoder, native = self._model, self._model.model, self._packer.native
        formats = Counter(weight.format for weight in self._packed.values())
        if self._packed and model.lm_head is None:
            head = self._packed.pop(decoder.embed_tokens)
            model.lm_head = PackedLinear(_as_head(head))
            size = sum(tensor.numel() * tensor.itemsize for tensor in model.lm_head.parameters())
            logger.info("the packed output head is also the embedding: %.0f MiB", size / _MIB)
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if child in self._packed:
                    packed = self._packed.pop(child)
                    weight = _as_head(packed) if child is model.lm_head else packed
                    setattr(parent, name, _layer(child, weight))
                elif child in self._latents:
                    setattr(parent, name, self._latents.pop(child))
                elif child in self._embeddings:
                    setattr(parent, name, self._embeddings.pop(child))
        if native is not None:
            decoder.tapes = DecodeTapes(native, decoder.num_stages)
        if not formats:
            return
        kinds = ", ".join(f"{count} x {format_.value}" for format_, count in formats.items())
        logger.info("linear layers packed for this CPU: %s", kinds)
        wanted = self._packer.weights
        if wanted is not None and 0 < self._num_coarse < _FEW_WEIGHTS:
            logger.warning(
                "--weights %s rounds this model's weights as they are loaded: models of less than"
                " a billion weights lose several percent of perplexity by it, with int8 below 1 %%",
                wanted.value,
            )

    def _pack(
        self, parts: Sequence[WeightPart], *, is_head: bool = False, has_gaps: bool = False
    ) -> ops.PackedWeight:
        wanted = self._packer.weights
        kept, layout = integers_alike(parts)
        if layout is not None and (wanted in (None, layout.format) or _has_room(wanted, layout)):
            weight = self._empty(parts, layout.format, layout, has_gaps=has_gaps)
            for part, integers in zip(parts, kept, strict=True):
                self._ops.pack_integers(weight, part.first_row, integers)
            return weight
        float8 = float8_alike(parts)
        if float8 and wanted in (None, WeightFormat.FP8):
            return self._keep_float8(parts, float8, has_gaps=has_gaps)
        if wanted is None:
            wanted = self._exact_format(parts)
        elif is_head and wanted in _COARSE:
            wanted = WeightFormat.INT8
        return self._pack_as(wanted, parts, has_gaps=has_gaps)

    def _keep_float8(
        self, parts: Sequence[WeightPart], kept: Sequence[Float8Rows], *, has_gaps: bool
    ) -> ops.PackedWeight:
        size, num_groups = kept[0].group_size, kept[0].scales.shape[1]
        layout = None if num_groups == 1 else CodeLayout(WeightFormat.FP8, size, torch.float32)
        weight = self._empty(parts, WeightFormat.FP8, layout, has_gaps=has_gaps)
        for part, rows in zip(parts, kept, strict=True):
            self._ops.pack_float8(weight, part.first_row, rows)
        return weight

    def _pack_latents(
        self, owner: LatentProjection, parts: Sequence[WeightPart]
    ) -> PackedLatentProjection:
        """Pack the matrices that turn latents into keys and values.

        The matrix of keys is transposed, so weights cannot keep the checkpoint's quantization
        groups. Each head's rows are padded with zeros to whole panels.
        """
        format_, width = self._exact_format(parts), self._packer.width
        keys, values = owner.parts(torch.cat([rows for part in parts for _, rows in part.pieces()]))
        both = []
        for heads in (keys.transpose(1, 2), values):  # [num_heads, outputs, inputs]
            filled = functional.pad(heads, (0, 0, 0, -heads.shape[1] % width))
            both.append(self._pack_as(format_, [WeightPart(0, filled.flatten(0, 1).contiguous())]))
        return PackedLatentProjection(*both)

    def _pack_as(
        self, format_: WeightFormat, parts: Sequence[WeightPart], *, has_gaps: bool = False
    ) -> ops.PackedWeight:
        weight = self._empty(parts, format_, has_gaps=has_gaps)
        if format_ in _COARSE:
            self._num_coarse += weight.out_features * weight.in_features
        for part in parts:
            for first_row, rows in part.pieces():
                self._ops.pack_rows(weight, first_row, rows)
        return weight

    def _empty(
        self,
        parts: Sequence[WeightPart],
        format_: WeightFormat,
        layout: CodeLayout | None = None,
        *,
        has_gaps: bool,
    ) -> ops.PackedWeight:
        width, num_rows = self._packer.width, sum(part.shape[0] for part in parts)
        if has_gaps:
            num_rows = max(part.first_row + part.shape[0] for part in parts)
            num_rows = -(-num_rows // width) * width
        sizes = (num_rows, parts[0].shape[1])
        return ops.PackedWeight.empty(
            *(*sizes, format_, width, self._memory.empty), layout=layout, has_gaps=has_gaps
        )

    def _exact_format(self, parts: Sequence[WeightPart]) -> WeightFormat:
        """Return the smallest format whose products equal those of the model's dtype bit for bit.

        For example, a 16-bit checkpoint is kept in 16 bits if the model computes in float32.
        """
        own = WeightFormat.of(self._packer.dtype)
        if own != WeightFormat.FP32:
            return own or WeightFormat.FP32
        if all(_is_float16(one) for one in parts):
            return WeightFormat.FP16
        return WeightFormat.BF16 if all(_is_bfloat16(one) for one in parts) else own


def _has_room(wanted: WeightFormat | None, layout: CodeLayout) -> bool:
    """Return whether a checkpoint's 6-bit integers are kept when INT8 is wanted."""
    return (wanted, layout.format) == (WeightFormat.INT8, WeightFormat.INT6)


def _as_head(weight: ops.PackedWeight) -> ops.PackedWeight:
    """Return an output head's weight whose inputs are rounded finely, to keep logits exact."""
    return replace(weight, has_fine_inputs=weight.format.code_bits is not None)


def _layer(linear: nn.Module, weight: ops.PackedWeight) -> PackedLinear:
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else linear.bias.detach().float()
    if bias is not None and isinstance(linear, ExpertsLinear):
        by_part = bias.view(-1, linear.part_sizes[0])
        bias = functional.pad(by_part, (0, -by_part.shape[1] % weight.width)).flatten()
    activation = linear.activation if isinstance(linear, GatedLinear) else None
    exact = isinstance(linear, ExactLinear)
    return PackedLinear(replace(weight, bias=bias), activation=activation, exact=exact)


def _spread(parts: Sequence[WeightPart], size: int, width: int) -> Iterator[WeightPart]:
    """Move rows so that each run of ``size`` rows begins at a new panel of ``width`` outputs."""
    room = -(-size // width) * width
    for part in parts:
        first, end = part.first_row, part.first_row + part.shape[0]
        for place in range(first // size, -(-end // size)):
            begin, stop = max(first, place * size), min(end, (place + 1) * size)
            rows = slice(begin - first, stop - first)
            yield part.moved(rows, begin + place * (room - size))


def _is_float16(part: WeightPart) -> bool:
    return isinstance(part.content, Tensor) and part.content.dtype == torch.float16


def _is_bfloat16(part: WeightPart) -> bool:
    """Return whether bfloat16 represents all numbers of a weight exactly."""
    if isinstance(part.content, Tensor) and part.content.dtype == torch.bfloat16:
        return True
    return all(
        torch.equal(rows.bfloat16().to(rows.dtype), rows)
        for _, piece in part.pieces()
        for rows in torch.split(piece, _ROWS)
    )


def _narrow(parts: Sequence[WeightPart]) -> Tensor:
    """Copy all rows of a weight into one bfloat16 tensor."""
    num_rows = sum(part.shape[0] for part in parts)
    weight = torch.empty(num_rows, *parts[0].shape[1:], dtype=torch.bfloat16)
    for part in parts:
        for first_row, rows in part.pieces():
            weight[first_row : first_row + len(rows)] = rows
    return weight
