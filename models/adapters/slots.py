"""AdapterSlots: a model's adapters in memory, and steps in which some rows are adapted.

A step without adapters runs the model as it is. A step with adapters runs a twin: the same modules
and weights, but with an `AdaptedLinear` around every layer that an adapter may adapt. The tokens of
one adapter lie side by side in a step. One call adds the products of all adapters to a layer's
output:

    step    | base .......... | adapter 1 ... | adapter 2 .. |      out[rows] += low_rank(x[rows])

Refuses to know: names of adapters, requests, files.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton.adapters.digest import AdapterDigest
from baton.adapters.files import AdaptedModule, Adapter, AdapterFiles
from baton_kernels.dispatch import native_ops
from models.adapters.low_rank import activation_of, make_low_rank, plain_product
from models.adapters.targets import Target, Targets
from models.base import AdapterSpan, ForwardContext
from models.cpu.decode_tapes import DecodeTapes
from models.decoder import Decoder, DecoderForCausalLM

_WIDTH = 16  # width of panels, if no kernel wants another


class _Step:
    """The adapters of the step that is being computed; one for all layers of a twin."""

    spans: tuple[AdapterSpan, ...] = ()


class AdaptedLinear(nn.Module):
    """A linear layer beside which adapters compute for some tokens.

    Args:
        layer: the base model's layer.
        step: says which tokens have which adapter.

    Attributes:
        layer: as given.
        loaded: this layer's part of each adapter that has one.
    """

    def __init__(self, layer: nn.Module, step: _Step) -> None:
        super().__init__()
        self.layer = layer
        self.loaded: dict[AdapterDigest, ops.LowRank] = {}
        self._step = step
        self._activation = activation_of(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[num_tokens, in_features]`` -> the layer's result, adapted."""
        spans = [
            ops.LowRankSpan(span.first, span.end, low_rank)
            for span in self._step.spans
            if (low_rank := self.loaded.get(span.adapter)) is not None
        ]
        if not spans:
            result: Tensor = self.layer(x)
            return result
        out = plain_product(self.layer, x)  # [num_tokens, out_features]
        ops.add_low_rank(out, x, spans)
        return out if self._activation is None else ops.gated_mul(out, self._activation)


class AdapterSlots:
    """The adapters of one model on a CPU. Used by one thread at a time, but for `check`.

    Args:
        model: the loaded model, which must not change any more.
        dtype: type that the model computes in.
    """

    def __init__(self, model: DecoderForCausalLM, dtype: torch.dtype) -> None:
        self._decoder, self._dtype = model.model, dtype
        self._targets = Targets.of(model.config)
        self._step = _Step()
        paths = {part.path for target in self._targets.by_name.values() for part in target.parts}
        self._layers = {
            path.removeprefix("model."): AdaptedLinear(model.get_submodule(path), self._step)
            for path in paths
        }
        wrapped = {layer.layer: layer for layer in self._layers.values()}
        twin = _twin(self._decoder, wrapped)
        assert isinstance(twin, Decoder)
        self._twin = twin
        self._forget_tapes()

    def check(self, files: AdapterFiles) -> None:
        """Raise AdapterError unless an adapter's names and shapes fit; safe from any thread."""
        self._targets.check(files)

    def load(self, adapter: Adapter) -> int:
        """Pack an adapter beside the model's layers; return its size in bytes.

        Raises:
            AdapterError: it does not fit the model; nothing is kept of it then.
        """
        self.check(adapter.files)
        made = {
            path: make_low_rank(
                self._layers[path].layer, f"model.{path}", adapter, modules, self._dtype, _width()
            )
            for path, modules in self._by_layer(adapter.files).items()
        }
        for path, low_rank in made.items():
            self._layers[path].loaded[adapter.digest] = low_rank
        return sum(low_rank.num_bytes for low_rank in made.values())

    def unload(self, digest: AdapterDigest) -> None:
        """Let go of an adapter, which no step may use any more; harmless if it is not there."""
        for layer in self._layers.values():
            layer.loaded.pop(digest, None)
        self._forget_tapes()  # they hold its memory

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute a step with adapters; see ``CausalLM.forward``."""
        self._step.spans = context.adapters
        self._twin.state_layers = self._decoder.state_layers
        hidden: Tensor = self._twin(input_ids, context)
        self._decoder.states = self._twin.states
        return hidden

    def _by_layer(self, files: AdapterFiles) -> Mapping[str, list[tuple[AdaptedModule, Target]]]:
        """Group an adapter's modules by the layer, as a path in the decoder, that has them."""
        found: dict[str, list[tuple[AdaptedModule, Target]]] = defaultdict(list)
        for name, module in files.modules.items():
            target = self._targets.by_name[name]
            for path in {part.path: None for part in target.parts}:
                found[path.removeprefix("model.")].append((module, target))
        return found

    def _forget_tapes(self) -> None:
        native = native_ops()
        if self._decoder.tapes is None or native is None:
            self._twin.tapes = None
        else:
            self._twin.tapes = DecodeTapes(native)


def _twin(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module without its weights, with other modules in place of some below it.

    Modules below which nothing is replaced are shared.
    """
    if module in replaced:
        return replaced[module]
    children = {name: _twin(child, replaced) for name, child in module.named_children()}
    if all(child is module.get_submodule(name) for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **children}
    return twin


def _width() -> int:
    """Return the outputs of a panel that this process's kernels read."""
    native = native_ops()
    return _WIDTH if native is None else native.panel_width
