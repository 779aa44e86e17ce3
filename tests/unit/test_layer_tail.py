"""When the ranges of a block's layers are pushed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from baton.kv.manifest import KVOrder
from kvconnector.base import BlockPush
from kvconnector.blocks import LayerRange
from prefill_node.layer_tail import LayerTails


class PushedLayers:
    """A sender that lists what is pushed."""

    def __init__(self) -> None:
        self.layers: list[LayerRange | None] = []

    def push(self, push: BlockPush) -> None:
        self.layers.append(push.layers)


def test_a_range_is_pushed_when_its_last_layer_is_computed() -> None:
    # Layers 2 to 5 read the KV of layers 0 and 1; layers 6 and 7 are a drafter's.
    group = SimpleNamespace(layers=(0, 1, 6, 7))
    memory = SimpleNamespace(
        spec=SimpleNamespace(groups=(group,), num_groups=1),
        manifest=SimpleNamespace(groups=(SimpleNamespace(order=KVOrder.LAYERS),)),
        layers_per_group=4,
        fence=lambda: None,
    )
    sender: Any = PushedLayers()
    engine: Any = SimpleNamespace(kv_memory=memory)
    tail = LayerTails(engine, sender).make_tail()
    tail.add_push(BlockPush(request_id="request", epoch=0, first_block=0, block_ids=(0,)))
    num_pushed = []
    for layer in range(8):
        tail.after_layer(layer)
        num_pushed.append(len(sender.layers))
    assert num_pushed == [1, 2, 2, 2, 2, 2, 3, 4]
    assert sender.layers == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert tail.is_complete
