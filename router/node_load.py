"""NodeLoad: what the router knows of how busy one node is. Its `Node` writes, policies read.

Counted here at once when a request is placed, not when the node gets round to reporting it.
"""

from __future__ import annotations

from baton.link import NodeBeat, NodeRegistration


class NodeLoad:
    """See `router.policies.base.NodeView`."""

    def __init__(self, registration: NodeRegistration) -> None:
        self.node_name = registration.node_name
        self.engine_id = registration.engine_id
        self.num_blocks = registration.num_blocks
        self.block_size = registration.block_size
        self.weight = 1.0
        self.num_open_requests = 0
        self.num_open_tokens = 0
        self.beat = NodeBeat()

    def note_opened(self, num_tokens: int) -> None:
        """A request was placed here."""
        self.num_open_requests += 1
        self.num_open_tokens += num_tokens

    def note_computed(self, num_tokens: int) -> None:
        """So many tokens of an open request are no longer before this node."""
        self.num_open_tokens -= num_tokens

    def note_closed(self, num_tokens: int) -> None:
        """A request ended here, with so many tokens left."""
        self.num_open_requests -= 1
        self.num_open_tokens -= num_tokens
