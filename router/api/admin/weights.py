"""WeightsChanges: passes operators' changes of weights to nodes, and prepares the pool of nodes.

A node that changes its weights drains, leaves the router and joins again with another identity. New
requests wait until the node returns. After a change, the pool serves the weights that its nodes
report, and no longer insists on the weights in the router's model folder.
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
    """Passes changes of weights to the nodes of one router.

    Args:
        bases: the router's base models.
    """

    def __init__(self, bases: Sequence[BaseModel]) -> None:
        self._bases = bases

    async def change(
        self, calls: NodeCalls, node: Node, request: admin_pb2.WeightsRequest
    ) -> admin_pb2.NodeWeights:
        """Pass an operator's request to a node; return the state of its weights without waiting.

        Raises:
            InvalidRequestError: the node refuses the change, or this router serves two base models
                that differ only in their weights. The router could then not tell to which of the
                two the changed node belongs.
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
        """Make the pool accept whatever weights its nodes report.

        Raises InvalidRequestError if another base model has the same configuration, because the
        router then tells the two apart by their weights.
        """
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
