"""`baton sim-node`: options, set-up, graceful end."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.access.exposure import split_address
from baton.access.tls_options import TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.block_hash import HASH_ALGORITHMS
from baton.cli.command_line import CommandLine
from baton.cli.log_options import LogFormatOption, LogLevelOption
from baton.cli.tls_options import TlsCaOption, TlsCertOption, TlsKeyOption
from baton.processes.process import run_program
from sim_node.faults import FaultSpec
from sim_node.options import SimOptions
from sim_node.timing import PRESETS
from sim_node.timing import preset as make_timing

app = CommandLine(add_completion=False)
_DEFAULTS = SimOptions()


@app.command()
def sim_node(
    model: Annotated[
        str, typer.Option(help="Model folder, GGUF file, or hub id; weights are not read.")
    ],
    router: Annotated[str, typer.Option(help="host:port of the router.")] = DEFAULT_ADDRESS,
    prefill: Annotated[int, typer.Option(help="Prefill nodes of this process.", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes of this process.", min=0)] = 1,
    name: Annotated[str, typer.Option(help="The nodes are NAME-p0, NAME-d0, ...")] = "sim",
    preset: Annotated[
        str, typer.Option(help=f"What is simulated: {', '.join(PRESETS)}.")
    ] = "h100-8b",
    time_scale: Annotated[
        float, typer.Option(help="Times as long as in the preset; 0.1: ten times as fast.")
    ] = 1.0,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = _DEFAULTS.block_size,
    num_blocks: Annotated[int, typer.Option(help="KV blocks of a node.")] = _DEFAULTS.num_blocks,
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of a request; 0: the model's own limit.")
    ] = 0,
    max_num_requests: Annotated[
        int, typer.Option(help="Most requests in a decode batch.")
    ] = _DEFAULTS.max_num_requests,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens in a prefill step.")
    ] = _DEFAULTS.max_num_batched_tokens,
    local_prefill_threshold: Annotated[
        int,
        typer.Option(
            help="A decode node computes the rest of a prompt itself when its prefix cache has all "
            "but so many tokens; 0: never."
        ),
    ] = _DEFAULTS.local_prefill_threshold,
    prefix_hash: Annotated[
        str, typer.Option(help=f"Names of prefixes: {', '.join(HASH_ALGORITHMS)}.")
    ] = _DEFAULTS.prefix_hash,
    faults: Annotated[
        str,
        typer.Option(
            help="What goes wrong, such as kill=0.5,restart_s=3,stall=0.5,stall_s=2 (per node and "
            "minute), slow=0.1,slow_factor=3 (share of nodes), refuse=0.01 (probability), seed=1."
        ),
    ] = "",
    join_timeout_s: Annotated[
        float, typer.Option(help="How long to try to reach the router at start, seconds.")
    ] = 30.0,
    node_token: Annotated[
        str,
        typer.Option(
            help="Shows the router that these nodes may join: its --node-token, or an API key with "
            "the role join.",
        ),
    ] = "",
    tls_cert: TlsCertOption = "",
    tls_key: TlsKeyOption = "",
    tls_ca: TlsCaOption = "",
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
) -> None:
    """Simulate prefill and decode nodes: the node protocol with a timing model, and no model."""

    async def run() -> None:
        from sim_node.cluster import SimCluster  # here: who asks for help does not wait for it
        from sim_node.simulate import simulate

        split_address("router", router)
        options = SimOptions(
            timing=make_timing(preset).scaled(time_scale),
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_requests=max_num_requests,
            max_num_batched_tokens=max_num_batched_tokens,
            local_prefill_threshold=local_prefill_threshold,
            prefix_hash=prefix_hash,
        )
        cluster = SimCluster(
            router,
            model,
            num_prefill=prefill,
            num_decode=decode,
            options=options,
            faults=FaultSpec.parse(faults),
            prefix=name,
            join_timeout_s=join_timeout_s,
            node_token=node_token,
            tls=TlsOptions(cert=tls_cert, key=tls_key, ca=tls_ca),
        )
        await simulate(cluster)

    raise typer.Exit(run_program(run, log_level=log_level, log_format=log_format))


if __name__ == "__main__":
    app(prog_name="baton sim-node")
