"""`baton up`: the options of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.addresses import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from baton.cli.text_options import (
    ChatTemplateOption,
    GenerationConfigOption,
    ServedModelNameOption,
)
from baton.cli.tls_options import InsecureOption


def up(
    model: Annotated[str, typer.Option(help="Model folder, GGUF file, or hub id.")],
    prefill: Annotated[int, typer.Option(help="Prefill nodes.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes.", min=1)] = 1,
    listen: Annotated[str, typer.Option(help="host:port of the router.")] = DEFAULT_ADDRESS,
    http_listen: Annotated[
        str, typer.Option(help='host:port of the OpenAI-compatible HTTP API; "": none.')
    ] = DEFAULT_HTTP_ADDRESS,
    served_model_name: ServedModelNameOption = "",
    chat_template: ChatTemplateOption = "",
    generation_config: GenerationConfigOption = "auto",
    tool_call_parser: Annotated[
        str,
        typer.Option(help="How the model writes calls of tools; as of `baton router`."),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(help="How the model writes its reasoning; as of `baton router`."),
    ] = "auto",
    policy: Annotated[str, typer.Option(help="Routing policy; as of `baton router`.")] = "cost",
    dtype: Annotated[str, typer.Option(help="Weights and computation.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV cache: auto (as --dtype) or fp8, half the bytes or less.")
    ] = "auto",
    kv_cache_memory: Annotated[
        str, typer.Option(help="KV memory of each node, such as 2G; auto: measured at start.")
    ] = "auto",
    node_args: Annotated[str, typer.Option(help="More options of every node, as one string.")] = "",
    decode_args: Annotated[
        str, typer.Option(help="More options of every decode node, as one string.")
    ] = "",
    log_folder: Annotated[
        Path | None, typer.Option(help="Where logs go; a temporary folder if not given.")
    ] = None,
    admin_token: Annotated[
        str,
        typer.Option(help="That admin calls must bring; none if empty."),
    ] = "",
    tls_folder: Annotated[
        Path | None,
        typer.Option(
            help="Certificates as `baton certs dev` makes them (ca.crt, router.crt, router.key, "
            "p0.crt, d0.crt, operator.crt, ...); then nobody gets in without one. No TLS if not "
            "given."
        ),
    ] = None,
    insecure: InsecureOption = False,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            help="When it is stopped, open requests have so long to end; a second Ctrl-C ends it "
            "at once."
        ),
    ] = 10.0,
    ready_timeout_s: Annotated[float, typer.Option(help="How long to wait for all nodes.")] = 120.0,
) -> None:
    """Start a router, prefill and decode nodes on this machine; Ctrl-C stops all of them.

    The machine's cores are divided between the nodes.
    """
    # Imported here: who asks for help does not wait for it.
    from baton.cli.run_up import run_up
    from baton.local_deployment import LocalDeploymentConfig

    config = LocalDeploymentConfig(
        model=model,
        listen=listen,
        http_listen=http_listen,
        num_prefill=prefill,
        num_decode=decode,
        router_args=[
            *("--policy", policy, "--served-model-name", served_model_name),
            *("--chat-template", chat_template, "--tool-call-parser", tool_call_parser),
            *("--reasoning-parser", reasoning_parser, "--generation-config", generation_config),
        ],
        node_args=[
            *("--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype),
            *("--kv-cache-memory", kv_cache_memory, *node_args.split()),
        ],
        decode_args=decode_args.split(),
        log_folder=log_folder,
        admin_token=admin_token,
        tls_folder=tls_folder,
        insecure=insecure,
        drain_timeout_s=drain_timeout_s,
    )
    raise typer.Exit(run_up(config, ready_timeout_s=ready_timeout_s))
