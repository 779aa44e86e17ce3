"""Assembles a decode node: an engine, a KV receiver, the loop over both, and its thread."""

from __future__ import annotations

from collections.abc import Callable

from baton.link.words import NodeEvent, NodeRole
from baton.node_program import NodeProgram
from baton.telemetry.tracing import Tracing
from baton.text.grammar_trials import EarlyGrammars
from decode_node.node import DecodeNode
from decode_node.options import DecodeNodeOptions
from kvconnector.block_digests import digests_are_wanted
from kvconnector.ends import Receiver
from kvconnector.transports.fault_file import faults_of
from kvconnector.transports.faults import FaultSpec
from node_runtime.node_engine import load_engine
from node_runtime.node_transport import open_transport
from node_runtime.threads import NodeThreads


def make_program(
    options: DecodeNodeOptions,
    emit: Callable[[NodeEvent], None],
    on_death: Callable[[Exception], None],
    grammars: EarlyGrammars | None = None,
) -> NodeProgram:
    """Load a decode node and start its threads.

    Args:
        options: options of the program.
        emit: takes events for the router; safe to call from any thread.
        on_death: called when the engine or the connector cannot continue.
        grammars: grammar parts made before any thread started; None: none.

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
    )

    tracing = Tracing(
        options.trace,
        service="baton-decode",
        resource={"service.instance.id": loaded.engine_id, "baton.node": options.name},
    )

    def make_node(wake: Callable[[], None]) -> tuple[DecodeNode, Receiver]:
        transport, digests = open_transport(options, loaded, faults, kv_digests=kv_digests)
        receiver = Receiver(transport, on_event=wake, on_death=on_death, digests=digests)
        receiver.loop.start()
        node = DecodeNode(loaded.engine, receiver, emit, options.decode, spans=tracing.sink)
        return node, receiver

    return NodeThreads(
        options.name,
        NodeRole.DECODE,
        loaded,
        make_node,
        emit,
        on_death,
        on_close=tracing.close,
        vllm_model=options.vllm_model,
        hang_at=faults.hang_engine if isinstance(faults, FaultSpec) else 0,
        poison=faults.poison if isinstance(faults, FaultSpec) else "",
    )
