"""LayerTail: the last chunks of one step, pushed some layers at a time while the rest computes.

Made before the step and called on the thread that computes; the sender posts elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvconnector.base import BlockPush
from kvconnector.blocks import LayerRange
from kvconnector.ends import Sender


class LayerTail:
    """Called after each layer of one step.

    Args:
        sender: where the pushes go.
        layer_groups: ranges of a block's layers, in order; each is pushed when its last layer is
            computed.
        num_layers: of the model, where blocks cannot be cut: their only range then ends with all.
        fence: asks whether a GPU has computed what was launched so far; see `KVMemory.fence`.

    Attributes:
        num_groups_pushed: of the layer groups.
    """

    def __init__(
        self,
        sender: Sender,
        layer_groups: Sequence[LayerRange],
        fence: Callable[[], Callable[[], bool] | None],
        num_layers: int | None = None,
    ) -> None:
        self._sender = sender
        self._layer_groups = layer_groups
        # How many layers are computed when each may go.
        self._ends = [end for _, end in layer_groups] if num_layers is None else [num_layers]
        assert len(self._ends) == len(layer_groups)
        self._fence = fence
        self._pushes: list[BlockPush] = []
        self.num_groups_pushed = 0

    def add(self, push: BlockPush) -> None:
        """Push these blocks, which the step makes complete."""
        self._pushes.append(push)

    @property
    def is_complete(self) -> bool:
        """Whether every layer was pushed."""
        return self.num_groups_pushed == len(self._layer_groups)

    def after_layer(self, layer: int) -> None:
        """Push the groups of layers that end with this one, or in a stage before this process's."""
        if self.is_complete or layer + 1 < self._ends[self.num_groups_pushed]:
            return
        is_computed = self._fence()
        while not self.is_complete:
            layers = self._layer_groups[self.num_groups_pushed]
            if self._ends[self.num_groups_pushed] > layer + 1:
                return
            for push in self._pushes:
                self._sender.push(dataclasses.replace(push, layers=layers, is_computed=is_computed))
            self.num_groups_pushed += 1
