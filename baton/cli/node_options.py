"""The options that both kinds of node take, and the command made of them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from typing import Annotated

import typer

from baton.access.audit_log import HELP as AUDIT_LOG_HELP
from baton.access.audit_log import STANDARD_OUTPUT
from baton.access.tls_options import TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.api.errors import ConfigError
from baton.block_hash import HASH_ALGORITHMS
from baton.cli.log_options import LogFormatOption, LogLevelOption
from baton.cli.run_node import NodeOptions, run_node
from baton.cli.tls_options import InsecureOption, TlsCaOption, TlsCertOption, TlsKeyOption
from baton.engine_config import DTYPES, KV_CACHE_DTYPES, WEIGHTS, EngineConfig
from baton.push_mode import PushMode

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_DEFAULTS = EngineConfig()


def parse_bytes(option: str, text: str) -> int:
    """``512M``, ``2GiB``, ``1000000``; raises ConfigError naming the option."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{option}: must be a number of bytes such as 512M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def node_command(
    role: str,
    summary: str,
    program: str,
    complete: Callable[[NodeOptions], NodeOptions] = lambda options: options,
) -> Callable[..., None]:
    """The command of a node program.

    Args:
        role: for the default name.
        summary: what `--help` says first.
        program: ``"package.module:function"`` that makes the node.
        complete: adds what only this role can be told; may raise ConfigError.
    """

    def command(
        model: Annotated[str, typer.Option(help="Model folder, GGUF file, or hub id.")],
        router: Annotated[
            list[str],
            typer.Option(
                help="host:port of a router; repeat it for several. A name with several addresses "
                "stands for all of them."
            ),
        ] = [DEFAULT_ADDRESS],  # noqa: B006  # typer never writes to it
        name: Annotated[str, typer.Option(help="Name of this node; made up if empty.")] = "",
        listen: Annotated[
            str, typer.Option(help="host:port of health, reflection and admin; port 0: any free.")
        ] = "127.0.0.1:0",
        metrics_listen: Annotated[
            str, typer.Option(help="host:port of a Prometheus page; port 0: any free; empty: none.")
        ] = "",
        join_timeout_s: Annotated[
            float, typer.Option(help="How long to try to reach the router at start, seconds.")
        ] = 30.0,
        drain_timeout_s: Annotated[
            float,
            typer.Option(
                help="How long open requests have to end when the node is told to stop (SIGTERM), "
                "seconds; a second signal ends it at once.",
                min=0,
            ),
        ] = 30.0,
        engine_timeout_s: Annotated[
            float,
            typer.Option(
                help="The process ends itself, with a dump, when its engine or KV connector "
                "has been in one step for so long, seconds; 0: never.",
                min=0,
            ),
        ] = 60.0,
        node_token: Annotated[
            str,
            typer.Option(
                help="Shows routers that this node may join: their --node-token, or an API key "
                "with the role join.",
            ),
        ] = "",
        admin_token: Annotated[
            str,
            typer.Option(
                help="That who looks at the metrics page must bring. Without it and "
                "--api-keys-file whoever reaches the page may look.",
            ),
        ] = "",
        api_keys_file: Annotated[
            str,
            typer.Option(
                help="API keys, as of the router; those with the role look or operate may look at "
                "the metrics page. Read again on SIGHUP.",
            ),
        ] = "",
        audit_log: Annotated[str, typer.Option(help=AUDIT_LOG_HELP)] = STANDARD_OUTPUT,
        tls_cert: TlsCertOption = "",
        tls_key: TlsKeyOption = "",
        tls_ca: TlsCaOption = "",
        insecure: InsecureOption = False,
        kv_connector: Annotated[
            str,
            typer.Option(
                help="How KV blocks travel. nixl: fast, not encrypted and not authenticated, for "
                "networks that are trusted. tls: encrypted, and both ends prove who they are. "
                "The same on all nodes."
            ),
        ] = "nixl",
        kv_listen: Annotated[
            str,
            typer.Option(
                help="With --kv-connector tls: host:port that peers send KV blocks to, an address "
                "of this machine that they reach; port 0: any free; by default on loopback."
            ),
        ] = "",
        dtype: Annotated[
            str, typer.Option(help=f"Weights and computation: {', '.join(DTYPES)}.")
        ] = _DEFAULTS.dtype,
        kv_cache_dtype: Annotated[
            str,
            typer.Option(
                help=f"KV cache: {', '.join(KV_CACHE_DTYPES)}; auto: as --dtype. The same on all "
                "nodes."
            ),
        ] = _DEFAULTS.kv_cache_dtype,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _DEFAULTS.device,
        num_threads: Annotated[
            int, typer.Option(help="Threads for computing; 0: all cores.", min=0)
        ] = 0,
        cpu_list: Annotated[
            str, typer.Option(help="Cores to run on, such as 0-3,8; empty: all that it may.")
        ] = "",
        weights: Annotated[
            str, typer.Option(help=f"How a CPU stores linear layers: {', '.join(WEIGHTS)}.")
        ] = _DEFAULTS.weights,
        native_kernels: Annotated[
            bool, typer.Option(help="On a CPU, use kernels in C (built at first use).")
        ] = _DEFAULTS.native_kernels,
        block_size: Annotated[
            int, typer.Option(help="Tokens per KV block; the same on all nodes.")
        ] = _DEFAULTS.block_size,
        num_blocks: Annotated[
            int, typer.Option(help="KV blocks; 0: as many as --kv-cache-memory holds.", min=0)
        ] = 0,
        kv_cache_memory: Annotated[
            str, typer.Option(help="Memory for KV blocks, such as 2G; auto: measured at start.")
        ] = "auto",
        memory_utilization: Annotated[
            float,
            typer.Option(
                help="Share of the device's memory that weights, activations and KV blocks may "
                "take together; 0: 0.9, and on a CPU at most 1 GiB of KV blocks.",
                min=0,
            ),
        ] = 0,
        max_model_len: Annotated[
            int, typer.Option(help="Most tokens of a request; 0: the model's own limit.", min=0)
        ] = 0,
        max_num_requests: Annotated[
            int, typer.Option(help="Most requests in a batch; 0: 64 on a CPU, 256 on a GPU.", min=0)
        ] = _DEFAULTS.max_num_requests,
        max_num_batched_tokens: Annotated[
            int, typer.Option(help="Most tokens in a step; 0: 1024 on a CPU, 8192 on a GPU.", min=0)
        ] = _DEFAULTS.max_num_batched_tokens,
        long_prefill_token_threshold: Annotated[
            int,
            typer.Option(
                help="Most tokens of one prompt in a step (its chunk); 0: 512 on a CPU, 4096 on a "
                "GPU.",
                min=0,
            ),
        ] = _DEFAULTS.long_prefill_token_threshold,
        scheduling_policy: Annotated[
            str, typer.Option(help="fcfs or priority.")
        ] = _DEFAULTS.scheduling_policy,
        prefix_cache: Annotated[
            bool, typer.Option(help="Find prefixes again that were computed before.")
        ] = _DEFAULTS.prefix_cache,
        prefix_hash: Annotated[
            str, typer.Option(help=f"Names of prefixes: {', '.join(HASH_ALGORITHMS)}.")
        ] = _DEFAULTS.prefix_hash,
        attention_backend: Annotated[
            str, typer.Option(help="A backend's name, or auto.")
        ] = _DEFAULTS.attention_backend,
        async_scheduling: Annotated[
            bool | None,
            typer.Option(help="Schedule a step while one runs; by default on a GPU only."),
        ] = None,
        cuda_graphs: Annotated[
            bool | None,
            typer.Option(help="Replay decode steps on a GPU; by default on decode nodes."),
        ] = None,
        cuda_graph_max_batch: Annotated[
            int, typer.Option(help="Most requests in a replayed step.", min=1)
        ] = _DEFAULTS.cuda_graph_max_batch,
        push: Annotated[
            PushMode, typer.Option(help="Of a prefill node: when KV blocks are sent.")
        ] = PushMode.LAYERS,
        layer_groups: Annotated[
            int,
            typer.Option(help="Of a prefill node: parts of a layer-wise sent chunk.", min=1),
        ] = 4,
        kv_digests: Annotated[
            bool | None,
            typer.Option(
                help="Check with keyed digests that KV blocks arrive unchanged; the same on all "
                "nodes. If not given: where UCX_NET_DEVICES lets KV leave loopback."
            ),
        ] = None,
        log_level: LogLevelOption = "info",
        log_format: LogFormatOption = "text",
        inject_faults: Annotated[
            str,
            typer.Option(
                help="For drills: what goes wrong in the KV connector, such as "
                "drop=0.01,delay=1ms-20ms,seed=3. Also: duplicate, reorder, corrupt, fail_post "
                "(probabilities), kill=NAME:send:N or kill=NAME:recv:N (a message, or Write). "
                "@FILE: what is in the file, also when that changes; @FOLDER: in its file of the "
                "node's name.",
            ),
        ] = "",
    ) -> None:
        options = NodeOptions(
            model=model,
            name=name or f"{role}-{socket.gethostname()}-{os.getpid()}",
            routers=tuple(router),
            listen=listen,
            join_timeout_s=join_timeout_s,
            kv_connector=kv_connector,
            kv_listen=kv_listen,
            engine=EngineConfig(
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                device=device,
                block_size=block_size,
                num_blocks=num_blocks or None,
                kv_cache_bytes=None
                if kv_cache_memory == "auto"
                else parse_bytes("kv_cache_memory", kv_cache_memory),
                memory_utilization=memory_utilization or None,
                max_model_len=max_model_len or None,
                max_num_requests=max_num_requests,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=long_prefill_token_threshold,
                scheduling_policy=scheduling_policy,
                prefix_cache=prefix_cache,
                prefix_hash=prefix_hash,
                attention_backend=attention_backend,
                async_scheduling=async_scheduling,
                cuda_graphs=role == "decode" if cuda_graphs is None else cuda_graphs,
                cuda_graph_max_batch=cuda_graph_max_batch,
                num_threads=num_threads,
                cpu_list=cpu_list,
                weights=weights,
                native_kernels=native_kernels,
            ),
            log_level=log_level,
            log_format=log_format,
            push=push,
            layer_groups=layer_groups,
            kv_digests=kv_digests,
            inject_faults=inject_faults,
            drain_timeout_s=drain_timeout_s,
            engine_timeout_s=engine_timeout_s,
            node_token=node_token,
            metrics_listen=metrics_listen,
            admin_token=admin_token,
            api_keys_file=api_keys_file,
            audit_log=audit_log,
            tls=TlsOptions(cert=tls_cert, key=tls_key, ca=tls_ca),
            insecure=insecure,
        )
        raise typer.Exit(run_node(complete(options), program))

    command.__doc__ = summary
    return command
