"""Targets: the linear layers of a model that an adapter may adapt, by their names in checkpoints.

PEFT names layers as ``transformers`` does. Some of them are parts of one layer here:

    self_attn.q_proj, k_proj, v_proj    rows of self_attn.qkv_proj, maybe in another order
    mlp.gate_proj, up_proj              rows of mlp.gate_up_proj

Refuses to know: an adapter's numbers, how products are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from baton.adapters.files import AdaptedModule, AdapterFiles
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.layers.latent_attention import LatentProjection
from models.layers.linear import ExactLinear, ExpertsLinear, JoinedLinear
from models.loading.loader import on_meta_device


@dataclass(frozen=True, slots=True, eq=False)
class TargetPart:
    """Some rows of a layer.

    Attributes:
        path: the layer's path in the model.
        rows: rows of the layer's output.
        order: the checkpoint's row of each of these rows, int64; None: they are the same.
    """

    path: str
    rows: slice
    order: Tensor | None = None

    def of(self, stored: Tensor) -> Tensor:
        """Return these rows of a tensor in the checkpoint's order, ``[num_outputs, ...]``."""
        return stored if self.order is None else stored[self.order]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A linear layer as checkpoints have it.

    Attributes:
        parts: where its outputs are in the model; they may be in two places.
    """

    num_inputs: int
    num_outputs: int
    parts: tuple[TargetPart, ...]


@dataclass(frozen=True, slots=True)
class Targets:
    """All linear layers of a model, by their names in checkpoints.

    Attributes:
        by_name: layers that can be adapted.
        refused: other layers, and why they cannot be adapted.
    """

    by_name: Mapping[str, Target]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, config: ModelConfig) -> Targets:
        """List the layers of a model with this configuration; needs no weights."""
        with on_meta_device():
            model = DecoderForCausalLM(config)
        by_name: dict[str, Target] = {}
        refused = {
            _stored_name(model, "model.embed_tokens"): "embeddings cannot be adapted",
            "lm_head": "the output head cannot be adapted",
        }
        for path, module in model.named_modules():
            if not isinstance(module, nn.Linear) or path == "lm_head":
                continue
            reason = _reason_against(module)
            for name, num_outputs, part in _parts(model, path, module):
                if reason:
                    refused[name] = reason
                    continue
                others = by_name[name].parts if name in by_name else ()
                by_name[name] = Target(module.in_features, num_outputs, (*others, part))
        return cls(by_name, refused)

    def check(self, files: AdapterFiles) -> None:
        """Raise AdapterError for the first tensor that does not fit the model."""
        for name, module in files.modules.items():
            target = self.by_name.get(name)
            if target is None:
                reason = self.refused.get(name, "the base model has no such linear layer")
                raise files.wrong(module.a, reason)
            _check_shapes(files, module, target)


def _check_shapes(files: AdapterFiles, module: AdaptedModule, target: Target) -> None:
    found = (module.a.shape[1], module.b.shape[0])
    for tensor, size, expected, side in (
        (module.a, found[0], target.num_inputs, "inputs"),
        (module.b, found[1], target.num_outputs, "outputs"),
    ):
        if size != expected:
            problem = f"shape {list(tensor.shape)}, but this layer has {expected} {side}"
            raise files.wrong(tensor, f"{problem} (was it trained for another base model?)")


def _reason_against(module: nn.Linear) -> str:
    """Return why a layer cannot be adapted; empty if it can be."""
    if isinstance(module, ExpertsLinear):
        return "layers of single experts cannot be adapted"
    if isinstance(module, ExactLinear):
        return "routers and gates of experts cannot be adapted"
    if isinstance(module, LatentProjection):
        return "the projection of latents to keys and values cannot be adapted"
    return ""


def _parts(
    model: DecoderForCausalLM, path: str, module: nn.Linear
) -> Iterator[tuple[str, int, TargetPart]]:
    """Yield a layer's names in checkpoints, their numbers of outputs there, and their rows."""
    if not isinstance(module, JoinedLinear) or module.stored_joined:
        yield _stored_name(model, path), module.out_features, TargetPart(path, slice(None))
        return
    parent = path.rpartition(".")[0]
    for part, rows in module.part_rows():
        name = _stored_name(model, f"{parent}.{module.stored_name(part)}")
        yield name, module.stored_rows(part), TargetPart(path, rows, module.row_order(part))


def _stored_name(model: DecoderForCausalLM, path: str) -> str:
    return model.checkpoint_name(f"{path}.weight").removesuffix(".weight")
