"""AdapterSlots: a model's LoRA adapters in memory, and steps in which some tokens have adapters.

A step without adapters runs the base model. A step with adapters runs a copy of the model that
shares all weights, but has a wrapper such as `AdaptedLinear` around every layer that an adapter may
change. The tokens of one adapter are adjacent in a step. In each layer, one call adds the products
of all adapters to the layer's output:

    step    | base .......... | adapter 1 ... | adapter 2 .. |      out[rows] += low_rank(x[rows])

Ranks divide the adapters' products as they divide the layers, so the base model's all-reduce also
sums the adapters' results.

Refuses to know: names of adapters, requests, files.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton.adapters.digest import AdapterDigest, AdapterError, shorten_digest
from baton.adapters.modules import Adapter, AdapterFiles
from baton.api.errors import is_out_of_memory
from baton_kernels.dispatch import native_ops
from models.adapters.embedding import AdaptedEmbedding
from models.adapters.experts import AdaptedExperts
from models.adapters.factors import read_factors
from models.adapters.latents import AdaptedLatents
from models.adapters.low_rank import (
    Piece,
    activation_of,
    make_low_rank,
    plain_product,
    row_squares,
)
from models.adapters.step import StepSpans
from models.adapters.targets import EMBEDDING, HEAD, TargetPart, Targets
from models.base import AdapterSpan, ForwardContext
from models.cpu.decode_tapes import DecodeTapes
from models.decoder import Decoder, DecoderForCausalLM
from models.layers.latent_attention import LatentProjection, PackedLatentProjection
from models.layers.moe import SparseMoe
from models.parallel.group import ALONE, Ranks
from models.recipe import LatentSpec

_WIDTH = 16  # width of panels, unless native kernels demand another


class AdaptedLinear(nn.Module):
    """A linear layer that adds the products of LoRA adapters for tokens that use an adapter.

    Args:
        layer: the base model's layer.
        step: tells which tokens have which adapter.

    Attributes:
        layer: the argument, unchanged.
        loaded: matrices of the loaded adapters that change this layer, by adapter digest.
    """

    def __init__(self, layer: nn.Module, step: StepSpans) -> None:
        super().__init__()
        self.layer = layer
        self.loaded: dict[AdapterDigest, ops.LowRank] = {}
        self._step = step
        self._activation = activation_of(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result with adapters, for ``[num_tokens, in_features]``."""
        found = self._step.found(self.loaded)
        if not found:
            result: Tensor = self.layer(x)
            return result
        out = plain_product(self.layer, x)  # [num_tokens, out_features]
        spans = [ops.LowRankSpan(rows.start, rows.stop, low_rank) for rows, low_rank in found]
        ops.add_low_rank(out, x, spans)
        return out if self._activation is None else ops.gated_mul(out, self._activation)

    def make(
        self, files: AdapterFiles, pieces: Sequence[Piece], dtype: torch.dtype, width: int
    ) -> ops.LowRank:
        """Pack an adapter's matrices for this layer; raises AdapterError."""
        return make_low_rank(self.layer, files, pieces, dtype, width)

    def squares(self, part: TargetPart, up: Tensor, down: Tensor) -> Tensor:
        """Return, for each row of a part, the squared norm of base weight + adapter."""
        return row_squares(self.layer, part.rows, up, down)


# A wrapped layer, to which adapters may add.
_Site = AdaptedLinear | AdaptedEmbedding | AdaptedExperts | AdaptedLatents
_Packed = Sequence[tuple[_Site, Any]]  # one adapter's matrices, each with the layer it changes
# The pieces of an adapter by layer, and the squared norms of the rows that DoRA pieces adapt.
_Read = tuple[Mapping[_Site, list[Piece]], dict[Piece, Tensor]]


class AdapterSlots:
    """The adapters of one model on a CPU.

    Only `check` and `pack` may be called from several threads at once.

    Args:
        model: the loaded model; nobody may replace its layers from now on.
        dtype: type that the model computes in.
        ranks: ranks that share the model. All ranks load the same adapters at the same time.
    """

    def __init__(self, model: DecoderForCausalLM, dtype: torch.dtype, ranks: Ranks = ALONE) -> None:
        self._decoder, self._config, self._dtype = model.model, model.config, dtype
        self._targets, self._group = Targets.of(model.config, ranks), ranks.group
        self._step, self._logits_step = StepSpans(), StepSpans()
        self._head: AdaptedLinear | None = None  # only the last stage has an output head
        self._sites: dict[str, _Site] = {}
        if ranks.is_last_stage:
            self._head = AdaptedLinear(_head_of(model), self._logits_step)
            self._sites[HEAD] = self._head
        self._loaded: set[AdapterDigest] = set()
        self._packed: weakref.WeakKeyDictionary[Adapter, _Packed] = weakref.WeakKeyDictionary()
        paths = {part.path for target in self._targets.by_name.values() for part in target.parts}
        mixtures: dict[str, AdaptedExperts] = {}
        for path in sorted(paths - {HEAD}):
            parent = path.rpartition(".")[0]
            moe, layer = model.get_submodule(parent), model.get_submodule(path)
            if isinstance(moe, SparseMoe) and layer in (moe.gate_up, moe.down):
                mixtures.setdefault(parent, AdaptedExperts(moe, self._step))
                self._sites[path] = mixtures[parent]
            else:
                self._sites[path] = self._make_site(path, layer)
        sites = [one for one in self._sites.values() if not isinstance(one, AdaptedExperts)]
        twin = _twin(self._decoder, {one.layer: one for one in sites if one is not self._head})
        assert isinstance(twin, Decoder)
        for path, experts in mixtures.items():
            moe = twin.get_submodule(path.removeprefix("model."))
            assert isinstance(moe, SparseMoe)
            assert moe is not model.get_submodule(path), "a part of it is a site"
            moe.adapted = experts
        self._twin, native = twin, native_ops()
        twin.tapes = None
        if self._decoder.tapes is not None and native is not None:
            twin.tapes = DecodeTapes(native, self._decoder.tapes.num_batches)

    def _make_site(
        self, path: str, layer: nn.Module
    ) -> AdaptedLinear | AdaptedEmbedding | AdaptedLatents:
        if path == EMBEDDING:
            return AdaptedEmbedding(layer, self._step)
        if isinstance(layer, LatentProjection | PackedLatentProjection):
            spec = self._config.layers[int(path.split(".")[2])].mixer
            assert isinstance(spec, LatentSpec)
            return AdaptedLatents(layer, spec, self._step)
        return AdaptedLinear(layer, self._step)

    def check(self, files: AdapterFiles) -> None:
        """Raise AdapterError if an adapter's tensor names or shapes do not fit the model.

        Safe from any thread.
        """
        self._targets.check(files)

    def pack(self, adapter: Adapter) -> int:
        """Pack an adapter's weights for `load`; return their size in bytes.

        Safe from any thread if a single rank has the model; several ranks pack at the same time,
        and exchange whether they can. The packed weights are kept as long as ``adapter`` lives.

        Raises AdapterError if the adapter does not fit the model.
        """
        # Several ranks always pack together: each other rank gets a new copy of the adapter, and
        # would wait in a sum for a rank that has packed the adapter before.
        if adapter not in self._packed or self._group.size > 1:
            self.check(adapter.files)
            found = self._with_norms(self._read(adapter))
            self._packed[adapter] = [
                (site, site.make(adapter.files, pieces, self._dtype, _width()))
                for site, pieces in found.items()
            ]
        return sum(part.num_bytes for _, part in self._packed[adapter])

    def load(self, adapter: Adapter) -> int:
        """Make an adapter available to steps; return its size in bytes.

        Raises:
            AdapterError: the adapter does not fit the model, or this machine's memory. This rank
                has then loaded nothing, but another rank may have loaded the adapter.
        """
        try:
            num_bytes = self.pack(adapter)  # takes no time if the adapter is packed already
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            short = shorten_digest(adapter.digest)
            raise AdapterError(f"{short}: does not fit in this machine's memory") from None
        for site, part in self._packed[adapter]:
            site.loaded[adapter.digest] = part
        self._loaded.add(adapter.digest)
        return num_bytes

    def unload(self, digest: AdapterDigest) -> None:
        """Unload an adapter that no step uses any more; do nothing if it is not loaded."""
        for site in self._sites.values():
            site.loaded.pop(digest, None)
        self._loaded.discard(digest)
        if self._twin.tapes is not None:
            self._twin.tapes.forget_adapter(digest)

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute a step with adapters; see ``CausalLM.forward``."""
        # Without this check, tokens of a missing adapter would silently get the base model's
        # results.
        missing = {span.adapter for span in context.adapters} - self._loaded
        assert not missing, f"a step uses adapters that are not loaded: {missing}"
        self._step.spans = context.adapters
        self._twin.state_layers = self._decoder.state_layers
        hidden: Tensor = self._twin(input_ids, context)
        self._decoder.states = self._twin.states
        return hidden

    def logits(self, hidden: Tensor, spans: tuple[AdapterSpan, ...]) -> Tensor:
        """Return the output head's results for ``[n, hidden_size]``.

        Args:
            spans: the rows that use adapters.
        """
        assert self._head is not None, "the last stage has the head"
        self._logits_step.spans = spans
        logits: Tensor = self._head(hidden)
        return logits

    def _pieces(self, adapter: Adapter) -> Mapping[_Site, list[Piece]]:
        """Read an adapter's modules, and group them by the layer of the model that they change."""
        found: dict[_Site, list[Piece]] = defaultdict(list)
        for name, module in adapter.files.modules.items():
            target = self._targets.find(name)
            assert target is not None, "pack has checked the names"
            parts = target.parts
            if not parts:  # another pipeline stage has this layer
                continue
            for expert, factors in enumerate(read_factors(adapter, module, self._config)):
                own = [one for one in parts if module.num_experts is None or one.expert == expert]
                for path in {part.path: None for part in own}:
                    of_path = [part for part in own if part.path == path]
                    found[self._sites[path]].append(Piece(factors, of_path))
        return found

    def _read(self, adapter: Adapter) -> _Read:
        """Read an adapter, and compute what ranks sum for it; raise if any rank has failed.

        Otherwise, the other ranks would wait in the sum for the rank that failed.
        """
        problem: Exception | None = None
        pieces: Mapping[_Site, list[Piece]] = {}
        squares: dict[Piece, Tensor] = {}
        try:
            pieces = self._pieces(adapter)
            squares = {
                piece: torch.cat(
                    [site.squares(part, up, piece.down) for part, up, _ in piece.rows()]
                )
                for site, of_site in pieces.items()
                if not isinstance(site, AdaptedEmbedding)
                for piece in of_site
                if piece.factors.magnitude is not None
            }
        except (AdapterError, MemoryError, RuntimeError) as error:
            problem = error
        if self._group.size > 1:
            num_failed = self._group.all_reduce(torch.tensor([float(problem is not None)]))
            if float(num_failed) and problem is None:
                problem = MemoryError("another rank has too little memory")
        if problem is not None:
            raise problem
        return pieces, squares

    def _with_norms(self, read: _Read) -> dict[_Site, list[Piece]]:
        """Add the norms of the adapted weights' rows to each piece that uses DoRA.

        If ranks divide columns, one all-reduce sums the squared norms of all these rows.
        """
        found, squares = read
        summed = [piece for piece in squares if piece.is_summed]
        if summed:
            every = self._group.all_reduce(torch.cat([squares[piece] for piece in summed]))
            sizes = [len(squares[piece]) for piece in summed]
            squares.update(zip(summed, torch.split(every, sizes), strict=True))

        def with_norms(piece: Piece) -> Piece:
            return replace(piece, norms=squares[piece].sqrt()) if piece in squares else piece

        return {site: [with_norms(piece) for piece in pieces] for site, pieces in found.items()}


def _twin(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module, but share its weights, and replace some of its submodules.

    Submodules that contain no replaced module are shared, not copied.
    """
    if module in replaced:
        return replaced[module]
    children = {name: _twin(child, replaced) for name, child in module.named_children()}
    if all(child is module.get_submodule(name) for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    return twin


def _head_of(model: DecoderForCausalLM) -> nn.Module:
    """Return the output head; if it is tied, a linear layer that shares the embedding's weight."""
    if model.lm_head is not None:
        return model.lm_head
    embedding = model.model.embed_tokens
    assert isinstance(embedding, nn.Embedding), "packed ones come with a head"
    # with several ranks, this rank's head has only a share of the vocabulary
    num_tokens = len(embedding.weight)
    head = nn.Linear(embedding.embedding_dim, num_tokens, bias=False, device="meta")
    head.weight = embedding.weight
    return head


def _width() -> int:
    """Return the number of outputs per panel that this process's kernels require."""
    native = native_ops()
    return _WIDTH if native is None else native.panel_width
