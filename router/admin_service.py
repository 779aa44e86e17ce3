"""Admin service: what operators may ask of the router."""

from __future__ import annotations

from baton import wire
from baton.link import NodeRegistration
from baton.rpc import Context
from baton.v1 import admin_pb2, admin_pb2_grpc
from router.node import Node
from router.node_pool import NodePool


class AdminService(admin_pb2_grpc.AdminServicer):
    """Serves `ListNodes`."""

    def __init__(self, pool: NodePool, model: str) -> None:
        self._pool = pool
        self._model = model

    async def ListNodes(  # gRPC's naming
        self, request: admin_pb2.ListNodesRequest, context: Context
    ) -> admin_pb2.ListNodesResponse:
        """All joined nodes, how busy they are, and whom they reach; and those that fell silent."""
        return admin_pb2.ListNodesResponse(
            nodes=[
                *(self._describe(node) for node in self._pool.nodes),
                *map(_describe_lost, self._pool.lost),
            ],
            model=self._model,
        )

    def _describe(self, node: Node) -> admin_pb2.NodeDescription:
        registration = node.registration
        peers = []
        for engine_id, report in node.reports.items():
            peer = self._pool.node(engine_id)
            if peer is not None:
                peers.append(
                    admin_pb2.PeerDescription(
                        node_name=peer.name,
                        connected=report.connected,
                        transport=report.transport,
                        problem=report.problem,
                        bandwidth_bytes_per_s=report.bandwidth_bytes_per_s,
                    )
                )
        return admin_pb2.NodeDescription(
            node_name=registration.node_name,
            engine_id=registration.engine_id,
            role=wire.role_to_proto(registration.role),
            address=registration.address,
            beat=wire.beat_to_proto(node.beat),
            peers=peers,
            num_requests=len(node.legs),
        )


def _describe_lost(registration: NodeRegistration) -> admin_pb2.NodeDescription:
    return admin_pb2.NodeDescription(
        node_name=registration.node_name,
        engine_id=registration.engine_id,
        role=wire.role_to_proto(registration.role),
        address=registration.address,
        lost=True,
    )
