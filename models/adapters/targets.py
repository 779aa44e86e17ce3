"""Targets: the layers of a model that an adapter may adapt, by their names in checkpoints.

PEFT names layers as ``transformers`` does. Some of these layers are parts of a fused layer in
Baton's model:

    self_attn.q_proj, k_proj, v_proj    rows of self_attn.qkv_proj, maybe in another order
    mlp.gate_proj, up_proj              rows of mlp.gate_up_proj

Layers of experts have several names. Layers of all experts may be stacked; ``*`` stands for all:

    mlp.experts.3.gate_proj     one expert's (checkpoints)
    mlp.experts.gate_up_proj    all experts' gates and ups (transformers)
    mlp.experts.*.gate_proj     all experts' gates (GGUF)

An adapter may have been trained on a model with an image part, whose text layers have other names:

    model.language_model.layers.0...    model.layers.0...

Ranks divide layers, so a rank has some rows or columns of a layer, or no part of the layer.

Refuses to know: an adapter's weights, how products are computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baton.adapters.digest import AdapterError
from baton.adapters.gguf import ANY_EXPERT, models_of
from baton.adapters.modules import AdaptedModule, AdapterFiles
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.layers.linear import ExpertsLinear, JoinedLinear
from models.loading.loader import on_meta_device
from models.loading.text_parts import text_name
from models.parallel.group import ALONE, Ranks
from models.parallel.shards import Kept, Rank
from models.recipe import ExpertsSpec

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_PREFIX, _BACKBONE = "model.", "backbone."
_EXPERT = "experts.{}."
_GATE = re.compile(r"\.mlp\.gate$")


@dataclass(frozen=True, slots=True, eq=False)
class TargetPart:
    """The rows of one adapted layer that this rank has.

    Attributes:
        path: the layer's path in the model.
        rows: these rows among the outputs of the layer; in a layer of experts, among the outputs of
            one expert.
        order: index of each row in the checkpoint's tensor; None: the checkpoint has the same
            order.
        expert: number of the expert that the layer belongs to; None: the layer is not an expert's.
        columns: inputs that the rank reads; for an embedding, the rank's share of the vocabulary;
            None: all inputs.
    """

    path: str
    rows: slice
    order: slice | Tensor | None = None
    expert: int | None = None
    columns: slice | None = None

    def of(self, stored: Tensor) -> Tensor:
        """Take these rows of ``stored``, ``[num_outputs, ...]``, in the checkpoint's order."""
        return stored if self.order is None else stored[self.order]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A layer that an adapter may adapt, as the checkpoint names it.

    Attributes:
        num_inputs: number of inputs; for an embedding, the size of the vocabulary.
        num_outputs: number of outputs; for stacked experts, number of outputs of one expert.
        parts: where this rank's model has the layer's outputs, possibly in two places; empty if
            only other ranks have the layer.
        num_experts: number of experts whose layers are stacked; None: the layer is not stacked.
        is_embedding: whether the layer is an embedding.
    """

    num_inputs: int
    num_outputs: int
    parts: tuple[TargetPart, ...]
    num_experts: int | None = None
    is_embedding: bool = False


@dataclass(frozen=True, slots=True)
class Targets:
    """All layers of a model that an adapter may adapt, by their names in files.

    Attributes:
        architecture: the model's name in config.json.
        by_name: the layers, by each of their names in checkpoints.
    """

    architecture: str
    by_name: Mapping[str, Target]

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks = ALONE) -> Targets:
        """List the layers that adapters may adapt in a model with this configuration.

        Args:
            ranks: ranks that share the model. A target's sizes are those of the whole model; its
                parts are those of this rank.
        """
        found = _found(config, ALONE)
        if ranks.everyone.size > 1:
            here = _found(config, ranks)
            found = {
                name: replace(target, parts=here[name].parts if name in here else ())
                for name, target in found.items()
            }
        aliases = {
            alias: target for name, target in found.items() for alias in _aliases(config, name)
        }
        return cls(config.architecture, {**found, **aliases})

    def find(self, name: str) -> Target | None:
        """Return the layer that an adapter calls ``name``; None: the model has no such layer."""
        return self.by_name.get(name) or self.by_name.get(text_name(name) or "")

    def check(self, files: AdapterFiles) -> None:
        """Raise AdapterError if a tensor has an unknown name or a wrong shape."""
        gguf = files.gguf_architecture
        if gguf and self.architecture not in models_of(gguf):
            problem = f"{gguf!r:.60}, but the base model is a {self.architecture}"
            raise AdapterError(f"{files.path}: general.architecture: {problem}")
        names: dict[Target, str] = {}
        for name, module in files.modules.items():
            target = self.find(name)
            if target is None:
                raise files.wrong(module.a, _why_unknown(name))
            if target in names:
                raise files.wrong(module.a, f"adapts the same layer as {names[target]:.200}")
            names[target] = name
            _check_kind(files, module, target)
            _check_shapes(files, module, target)


def _why_unknown(name: str) -> str:
    """Return why adapters may adapt no layer of this name, as the text of an error."""
    if text_name(name) is None:
        return "adapts the image part, and only text is computed; train with PEFT's exclude_modules"
    return f"the base model has no linear layer {name:.200}"


def _check_kind(files: AdapterFiles, module: AdaptedModule, target: Target) -> None:
    if module.is_embedding != target.is_embedding:
        expected = "an embedding" if target.is_embedding else "a linear layer"
        raise files.wrong(module.a, f"the base model has {expected} of this name")
    if module.num_experts != target.num_experts:
        problem = f"{module.num_experts or 'no'} stacked experts"
        expected = f"{target.num_experts or 'no'} in this layer"
        raise files.wrong(module.a, f"{problem}, but the base model has {expected}")


def _check_shapes(files: AdapterFiles, module: AdaptedModule, target: Target) -> None:
    for tensor, size, expected, side in (
        (module.a, module.num_inputs, target.num_inputs, "inputs"),
        (module.b, module.num_outputs, target.num_outputs, "outputs"),
    ):
        if size != expected:
            problem = f"shape {list(tensor.shape)}, but this layer has {expected} {side}"
            raise files.wrong(tensor, f"{problem} (was it trained for another base model?)")


def _found(config: ModelConfig, ranks: Ranks) -> dict[str, Target]:
    """Return the parts of layers that a rank has, by the parts' names in the built model."""
    with on_meta_device():
        model = DecoderForCausalLM(config)
        if ranks.everyone.size > 1:
            model.shard(ranks)
    found: dict[str, Target] = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertsLinear):
            named = _experts(model, path, module)
        elif isinstance(module, nn.Linear):
            named = _linears(path, module)
        else:
            continue
        for name, target in named:
            before = found[name].parts if name in found else ()
            found[name] = replace(target, parts=(*before, *target.parts))
    vocab, hidden, whole = config.vocab_size, config.hidden_size, slice(None)
    own = Rank(ranks.group.rank, ranks.group.size).span(vocab)
    share = None if ranks.group.size == 1 else slice(*own)
    if ranks.is_first_stage:
        part = TargetPart(EMBEDDING, whole, columns=share)
        found[EMBEDDING] = Target(vocab, hidden, (part,), is_embedding=True)
    if ranks.is_last_stage:
        found[HEAD] = Target(hidden, vocab, (TargetPart(HEAD, whole, share),))
    return found


def _kept(module: nn.Module, name: str) -> Kept | None:
    """Return which part of a checkpoint's weight this rank keeps; None: the whole weight."""
    kept: Kept | None = getattr(module, "kept", {}).get(name)
    return kept


def _linears(path: str, module: nn.Linear) -> Iterator[tuple[str, Target]]:
    """Yield each projection in a linear layer: the name in the model, and the rows."""
    if path == HEAD:
        return
    if not isinstance(module, JoinedLinear) or module.stored_joined:
        kept = _kept(module, "weight")
        order, columns = (None, None) if kept is None else (kept.rows, kept.columns)
        part = TargetPart(path, slice(None), order, columns=columns)
        yield path, Target(module.in_features, module.out_features, (part,))
        return
    parent = path.rpartition(".")[0]
    for name, rows in module.part_rows():
        kept = _kept(module, f"{name}.weight")
        part = TargetPart(path, rows, module.row_order(name) if kept is None else kept.rows)
        size = module.stored_rows(name)
        yield f"{parent}.{module.stored_name(name)}", Target(module.in_features, size, (part,))


def _experts(
    model: DecoderForCausalLM, path: str, module: ExpertsLinear
) -> Iterator[tuple[str, Target]]:
    """Yield experts' layers under the names for one expert and for all experts (stacked)."""
    parent = path.rpartition(".")[0]
    names = [name for name, _ in module.part_rows()]
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))  # gates before ups
    # this rank's experts: if ranks divide the experts, only some
    numbers = list(dict.fromkeys(int(name.split(".")[1]) for name in names))
    num_experts, size = len(numbers), module.part_sizes[0]
    kept = _kept(module, f"{names[0]}.weight")  # equal for all experts
    whole = size if kept is None else kept.shape[0]
    own, columns = (None, None) if kept is None else (kept.rows, kept.columns)
    by_turns = _spec_of(model, path).stored_by_turns
    fused: list[TargetPart] = []
    for place, kind in enumerate(kinds):
        rows = slice(place * size, (place + 1) * size)
        stacked = [TargetPart(path, rows, own, one, columns) for one in numbers]
        for expert, part in zip(numbers, stacked, strict=True):
            name = f"{parent}.{_EXPERT.format(expert)}{kind}"
            yield name, Target(module.in_features, size, (part,))
        every = f"{parent}.{_EXPERT.format(ANY_EXPERT)}{kind}"
        yield every, Target(module.in_features, size, tuple(stacked), num_experts)
        if len(kinds) > 1:
            step = len(kinds) if by_turns else 1
            first = place if by_turns else place * whole
            order = torch.arange(first, first + step * whole, step, device="cpu")[:whole]
            order = order if own is None else order[own]
            fused += [TargetPart(path, rows, order, one, columns) for one in numbers]
        else:
            fused += stacked
    name = f"{parent}.experts.{'gate_up_proj' if len(kinds) > 1 else kinds[0]}"
    yield name, Target(module.in_features, len(kinds) * size, tuple(fused), num_experts)


def _spec_of(model: DecoderForCausalLM, path: str) -> ExpertsSpec:
    """Return the spec of the experts in the decoder layer to which a path leads."""
    spec = model.config.layers[int(path.split(".")[2])].experts
    assert spec is not None, "the path leads to experts"
    return spec


def _aliases(config: ModelConfig, name: str) -> Iterator[str]:
    """Yield the names that checkpoints and ``transformers`` give to a layer."""
    stored = config.recipe.stored_name(f"{name}.weight").removesuffix(".weight")
    yield stored
    if stored.startswith(_BACKBONE):  # names in Nemotron-H's checkpoints
        yield _PREFIX + stored.removeprefix(_BACKBONE)
    if name.startswith(_PREFIX):
        yield config.recipe.stored_prefix + name.removeprefix(_PREFIX)
    if config.experts is not None and config.experts.stored_as_linears:
        # Granite 4's modules are named differently from its checkpoints and from other models'
        # modules.
        yield _GATE.sub(".block_sparse_moe.router", name).replace(
            ".mlp.experts.", ".block_sparse_moe.experts."
        )
