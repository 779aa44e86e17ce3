"""WeightsChanges: passes operators' changes of weights to nodes, and prepares the pool.

A node that changes its weights drains, leaves and joins again with another identity. New requests
wait until it returns. From then on, the nodes decide which weights are served, not the folder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.api.errors import InvalidRequestError
from baton.v1 import admin_pb2
from router.api.admin.node_calls import NodeCalls
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from router.names.base_model import BaseModel

logger = logging.getLogger(__name__)


class WeightsChanges:
    """Change the weights of one router's nodes.

    Args:
        bases: the router's base models.
    """

    def __init__(self, bases: Sequence[BaseModel]) -> None:
        self._bases = bases

    async def change(
        self, calls: NodeCalls, node: Node, request: admin_pb2.WeightsRequest
    ) -> admin_pb2.NodeWeights:
        """Begin a change of a node's weights, and return the state at once.

        Raises:
            InvalidRequestError: the node refuses the change, or could not join again.
            NodeUnavailableError: the node does not answer.
        """
        if request.action == admin_pb2.WeightsAction.WEIGHTS_ACTION_USE:
            self._prepare(node)
        found = await calls.change_weights(node, request)
        if request.action == admin_pb2.WeightsAction.WEIGHTS_ACTION_USE:
            node.changes_weights = True
        if request.action != admin_pb2.WeightsAction.WEIGHTS_ACTION_DESCRIBE:
            action = admin_pb2.WeightsAction.Name(request.action).removeprefix("WEIGHTS_ACTION_")
            logger.info("weights of %s: %s %s", node.name, action.lower(), request.source)
        if found.state == "serving":
            node.changes_weights = False
        return admin_pb2.NodeWeights(node_name=node.name, weights=found)

    def _prepare(self, node: Node) -> None:
        """Make the pool accept the weights that nodes report, not only those of the folder."""
        pool = self._pool_of(node)
        alike = [
            base
            for base in self._bases
            if base.pool.own_identity["model"] == pool.own_identity["model"]
        ]
        if len(alike) > 1:
            raise InvalidRequestError(
                "weights",
                "this router serves several base models of this configuration and tells them apart "
                "by their weights; change names instead",
            )
        pool.identity.follow_nodes()

    def _pool_of(self, node: Node) -> NodePool:
        return next(base.pool for base in self._bases if node in base.pool.nodes)
