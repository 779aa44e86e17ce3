"""Assembles a prefill or decode node: its engine, its end of the KV connector, their threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.link.words import NodeEvent, NodeRole
from baton.telemetry.spans import SpanSink
from baton.telemetry.tracing import Tracing
from baton.text.grammar_trials import EarlyGrammars
from engine.engine import Engine
from kvconnector.block_digests import BlockDigests, digests_are_wanted
from kvconnector.transports.base import KVTransport
from kvconnector.transports.fault_file import faults_of
from kvconnector.transports.faults import FaultSpec
from node_runtime.adapters.adapter_queue import AdapterQueue
from node_runtime.node_engine import LoadedEngine, load_adapters, load_engine
from node_runtime.node_transport import open_transport
from node_runtime.option_checks import source_of
from node_runtime.options import NodeOptions
from node_runtime.threads import ConnectorEnds, Node, NodeThreads


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Parts that `make_node` gets to make the node of a role.

    Attributes:
        loaded: the engine with its identity.
        digests: checks arriving blocks; None: blocks are not checked.
        wake: wakes the engine's thread because there is work; safe from any thread.
        emit: sends events to the router.
        on_death: called with the error when the connector cannot continue.
        spans: receives the spans of traced requests; None: no tracing.
        adapters: holds commands until their adapters are in memory.
    """

    engine: Engine
    loaded: LoadedEngine
    transport: KVTransport
    digests: BlockDigests | None
    wake: Callable[[], None]
    emit: Callable[[NodeEvent], None]
    on_death: Callable[[Exception], None]
    spans: SpanSink | None
    adapters: AdapterQueue

    @property
    def engine_id(self) -> str:
        """The node's engine id."""
        return self.loaded.engine_id


def make_threads(
    role: NodeRole,
    options: NodeOptions,
    make_node: Callable[[NodeParts], tuple[Node, ConnectorEnds]],
    emit: Callable[[NodeEvent], None],
    on_death: Callable[[Exception], None],
    grammars: EarlyGrammars | None = None,
) -> NodeThreads:
    """Load a node and start its threads.

    Args:
        options: options of the program.
        make_node: makes the role's loop and its ends of the KV connector, and starts these ends.
        emit: sends events to the router; safe to call from any thread.
        on_death: called with the error when the engine or the connector cannot continue.
        grammars: the parts that compile grammars, made before any thread started; None: the engine
            makes them later.

    Raises:
        ConfigError: an option does not fit the model or the machine.
    """
    faults = faults_of(options.inject_faults, options.name)
    kv_digests = digests_are_wanted(options.kv_digests, options.kv_connector)
    loaded = load_engine(
        options.model,
        options.engine,
        node_name=options.name,
        kv_connector=options.kv_connector,
        kv_digests=kv_digests,
        revision=options.revision,
        grammars=grammars,
        loads_adapters=options.engine.max_adapters > 0,
    )
    adapter_root = Path(options.adapter_root) if options.adapter_root else None
    load_adapters(loaded.engine, adapter_root, [source_of(one) for one in options.adapters])
    tracing = Tracing(
        options.trace,
        service=f"baton-{role.value}",
        resource={"service.instance.id": loaded.engine_id, "baton.node": options.name},
    )

    def join(wake: Callable[[], None]) -> tuple[Node, ConnectorEnds]:
        transport, digests = open_transport(options, loaded, faults, kv_digests=kv_digests)
        # On a prefill node, a prompt waits for its adapter, so reading has priority. On a decode
        # node, the clients of all running requests wait for each step, so steps have priority.
        gives_way = role is NodeRole.DECODE
        adapters = AdapterQueue(loaded.engine, adapter_root, wake, gives_way=gives_way)
        return make_node(
            NodeParts(
                engine=loaded.engine,
                loaded=loaded,
                transport=transport,
                digests=digests,
                wake=wake,
                emit=emit,
                on_death=on_death,
                spans=tracing.sink,
                adapters=adapters,
            )
        )

    return NodeThreads(
        options.name,
        role,
        loaded,
        join,
        emit,
        on_death,
        pushes=role is NodeRole.PREFILL,
        on_close=tracing.close,
        adapter_root=adapter_root,
        weights_root=Path(options.weights_root) if options.weights_root else None,
        vllm_model=options.vllm_model,
        hang_at=faults.hang_engine if isinstance(faults, FaultSpec) else 0,
        poison=faults.poison if isinstance(faults, FaultSpec) else "",
    )
