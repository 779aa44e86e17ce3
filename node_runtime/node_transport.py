"""Opens a node's end of the KV connector: the transport of all its ranks, and digests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.access.tls import TlsFiles
from kvconnector import KV_CONNECTORS
from kvconnector.block_digests import BlockDigests
from kvconnector.ranks.messages import Open
from kvconnector.ranks.transport import RanksTransport
from kvconnector.transports.base import NO_OPTIONS, KVTransport, TransportOptions
from kvconnector.transports.faults import FaultSpec, FaultyTransport
from node_runtime.node_engine import LoadedEngine
from node_runtime.options import NodeOptions

_RANK_SERVICE = "kvconnector.ranks.service:serve"


def open_transport(
    options: NodeOptions,
    loaded: LoadedEngine,
    faults: FaultSpec | Callable[[], FaultSpec] | None,
    *,
    kv_digests: bool,
) -> tuple[KVTransport, BlockDigests | None]:
    """Open the transport of each rank; raises ConfigError.

    Args:
        options: options of the node.
        loaded: the engine whose memory peers access.
        faults: faults to inject; None: no faults.
        kv_digests: whether blocks are checked by digests.
    """
    memory, engine_id = loaded.engine.kv_memory, loaded.engine_id
    start = Open(options.kv_connector, engine_id)
    # The other ranks open their transports at the same time.
    links = loaded.engine.executor.attach(_RANK_SERVICE, msgspec.msgpack.encode(start))
    transport: KVTransport = KV_CONNECTORS.load(options.kv_connector)(
        engine_id,
        memory,
        TransportOptions(
            listen=options.kv_listen or NO_OPTIONS.listen,
            tls=TlsFiles(options.tls) if options.tls.verifies_clients else None,
        ),
    )
    ranks = RanksTransport(transport, links) if links else None
    transport = ranks or transport
    if faults is not None:
        transport = FaultyTransport(transport, memory, faults)
    return transport, BlockDigests(memory, ranks) if kv_digests else None
