"""`baton sim-node`: runs simulated nodes."""

from __future__ import annotations

import typer

from baton.access.exposure import split_address
from baton.cli.config_file import program
from baton.processes.process import run_program
from sim_node.options import SimNodeOptions


@program
def sim_node(options: SimNodeOptions) -> None:
    """Simulate prefill and decode nodes: the node protocol with a timing model, and no model."""

    async def run() -> None:
        # Import here, so that `--help` is fast.
        from sim_node.cluster import SimCluster
        from sim_node.faults import FaultSpec
        from sim_node.scripted_outputs import read_script
        from sim_node.simulate import simulate

        split_address("router", options.router)
        cluster = SimCluster(
            options.router,
            options.model,
            num_prefill=options.prefill,
            num_decode=options.decode,
            options=options.node_sizes(),
            faults=FaultSpec.parse(options.faults),
            prefix=options.name,
            join_timeout_s=options.join_timeout_s,
            node_token=options.node_token,
            tls=options.tls,
            outputs=read_script(options.script, options.model) if options.script else None,
        )
        await simulate(cluster)

    raise typer.Exit(run_program(run, options.log))
