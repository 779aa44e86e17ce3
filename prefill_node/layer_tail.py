"""LayerTail: pushes a prompt's last blocks, group by group of layers, while later layers compute.

The tail of a step is made before the step, and called on the thread that computes the step; the
sender posts the writes on another thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from baton.kv.manifest import KVOrder
from baton.limits import NUM_LAYER_GROUPS
from engine.engine import Engine
from kvconnector.base import BlockPush
from kvconnector.blocks import LayerRange, layer_groups
from kvconnector.ends import Sender


class LayerTail:
    """Pushes the blocks that one step completes, one group of layers after the other.

    Args:
        sender: sends the pushed blocks.
        layer_groups: ranges of a block's layers, in order; each range is pushed once its last layer
            is computed.
        ends: for each range, how many of the model's layers are computed when the range is.
        fence: returns a function that tells whether a GPU has finished all work launched so far;
            see `KVMemory.fence`.

    Attributes:
        num_groups_pushed: number of layer groups that were pushed.
    """

    def __init__(
        self,
        sender: Sender,
        layer_groups: Sequence[LayerRange],
        ends: Sequence[int],
        fence: Callable[[], Callable[[], bool] | None],
    ) -> None:
        assert len(ends) == len(layer_groups)
        self._sender = sender
        self._layer_groups, self._ends = layer_groups, ends
        self._fence = fence
        self._pushes: list[BlockPush] = []
        self.num_groups_pushed = 0

    def add_push(self, push: BlockPush) -> None:
        """Add blocks of one request to those that this tail pushes."""
        self._pushes.append(push)

    @property
    def is_complete(self) -> bool:
        """Return whether all layer groups were pushed."""
        return self.num_groups_pushed == len(self._layer_groups)

    def after_layer(self, layer: int) -> None:
        """Push the layer groups whose last layer has now been computed."""
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


class LayerTails:
    """Makes the tails of one node's steps.

    A block whose bytes are in the order `KVOrder.HEADS` cannot be divided by layers: the whole
    block is sent after the last layer, before sampling. A model with several KV cache groups has no
    tail, because a group's layers are not computed one after another.

    Attributes:
        has_any: whether steps that end a prompt get a tail.
    """

    def __init__(self, engine: Engine, sender: Sender) -> None:
        memory = engine.kv_memory
        layers = memory.spec.groups[0].layers
        can_cut = memory.layers_per_group == len(layers)
        is_by_heads = memory.manifest.groups[0].order is KVOrder.HEADS
        self.has_any = memory.spec.num_groups == 1 and (can_cut or is_by_heads)
        self._sender, self._fence = sender, memory.fence
        self._layer_groups = layer_groups(memory.layers_per_group, NUM_LAYER_GROUPS)
        # Between the group's layers there may be layers that read other layers' KV.
        self._ends = (
            [layers[end - 1] + 1 for _, end in self._layer_groups] if can_cut else [layers[-1] + 1]
        )

    def make_tail(self) -> LayerTail:
        """Make the tail of the next step."""
        return LayerTail(self._sender, self._layer_groups, self._ends, self._fence)
