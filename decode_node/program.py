"""DecodeProgram: a decode node with its threads: the engine's and the KV connector's."""

from __future__ import annotations

from collections.abc import Callable

from baton.cli.node_options import NodeOptions
from baton.link import (
    AbortAll,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    RequestView,
    RouterCommand,
)
from decode_node.node import DecodeNode
from engine.crash_dump import dump_crash
from engine.engine_loop import EngineLoop
from engine.node_engine import load_engine
from kvconnector import KV_CONNECTORS
from kvconnector.receiver import Receiver


class DecodeProgram:
    """See `NodeProgram` for the contract.

    Args:
        options: of the program.
        emit: takes events for the router; safe to call from any thread.
        on_death: called when the engine cannot continue.
    """

    def __init__(
        self,
        options: NodeOptions,
        emit: Callable[[NodeEvent], None],
        on_death: Callable[[Exception], None],
    ) -> None:
        make_transport = KV_CONNECTORS.load(options.kv_connector)
        self._name = options.name
        self._loaded = load_engine(
            options.model,
            options.engine,
            node_name=options.name,
            kv_connector=options.kv_connector,
        )
        transport = make_transport(self._loaded.engine_id, self._loaded.engine.kv_cache)
        self._receiver = Receiver(transport, on_event=self._wake, on_death=on_death)
        self._node = DecodeNode(self._loaded.engine, self._receiver, emit)

        def on_engine_death(error: Exception) -> None:
            dump_crash(self._loaded.engine, error)
            on_death(error)

        self._loop = EngineLoop(self._node.step, on_engine_death, name="engine")
        self._loop.start()

    def registration(self, address: str) -> NodeRegistration:
        peer_info = self._receiver.peer_info.encode()
        return self._loaded.registration(self._name, NodeRole.DECODE, address, peer_info)

    def submit(self, command: RouterCommand | AbortAll) -> None:
        self._node.submit(command)
        self._loop.wake()

    def beat(self) -> NodeBeat:
        return self._node.beat()

    def requests(self) -> list[RequestView]:
        return self._node.requests()

    def close(self) -> None:
        self._loop.stop()
        self._receiver.close()

    def _wake(self) -> None:
        self._loop.wake()
