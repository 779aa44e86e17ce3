"""ProgramOptions: the options of every node. NodeOptions: the options of nodes with an engine.

Each kind of node adds more options in its own package.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.access.access_options import AUDIT_LOG_HELP, INSECURE_HELP, STANDARD_OUTPUT
from baton.access.tls_options import ONLY_ROUTERS, TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.engine_config import MAX_PROMPT_WAIT_S, EngineConfig
from baton.limits import REVISION_HELP, parse_revision
from baton.options import check_limits, group, option
from baton.telemetry.compat_options import COMPAT_HELP, COMPAT_NAMES
from baton.telemetry.log_options import LogOptions
from baton.telemetry.trace_options import TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """Options of every node; a wrong value raises ConfigError with the field's name."""

    model: str = option(help="Model folder, GGUF file, or hub id.")
    routers: tuple[str, ...] = option(
        (DEFAULT_ADDRESS,),
        name="router",
        help="host:port of a router; repeat it for several. A name with several addresses stands "
        "for all of them.",
    )
    name: str = option("", help="Name of this node; empty: a random name.")
    revision: str = option("", parse=parse_revision, help=REVISION_HELP)
    ready_with_peer: bool = option(
        False,
        help="Be ready (health checks, /ready) only while a node of the other role can be "
        "reached, so that a rolling update waits for both roles. A prefill node needs a decode "
        "node, and an encode node needs a prefill node.",
    )
    listen: str = option(
        "127.0.0.1:0", help="host:port for health, reflection and admin; port 0: any free port."
    )
    metrics_listen: str = option(
        "", help="host:port of a Prometheus page; port 0: any free port; empty: no page."
    )
    join_timeout_s: float = option(
        30.0, least=0, help="How long to try to reach the router at start, seconds."
    )
    drain_timeout_s: float = option(
        30.0,
        least=0,
        help="Time for open requests to end when the node is told to stop (SIGTERM), seconds; a "
        "second signal ends it at once.",
    )
    engine_timeout_s: float = option(
        60.0,
        least=0,
        help="The process writes a dump and ends when its engine or KV connector has been in one "
        "step for this long, seconds; 0: never.",
    )
    node_token: str = option(
        "",
        is_secret=True,
        help="Proof for routers that this node may join: their --node-token, or an API key with "
        "the role join.",
    )
    admin_token: str = option(
        "",
        is_secret=True,
        help="Token that readers of the metrics page must send. Without it and --api-keys-file, "
        "anyone who reaches the page may read it.",
    )
    api_keys_file: str = option(
        "",
        help="File of API keys, as at the router; keys with the role look or operate may read "
        "the metrics page. Reloaded on SIGHUP.",
    )
    audit_log: str = option(STANDARD_OUTPUT, help=AUDIT_LOG_HELP)
    tls: TlsOptions = group(TlsOptions, without=ONLY_ROUTERS)
    insecure: bool = option(False, help=INSECURE_HELP)
    kv_connector: str = option(
        "nixl",
        help="Transport of KV blocks. nixl: fast, neither encrypted nor authenticated, for "
        "trusted networks. tls: encrypted, and both ends prove who they are. The same on all "
        "nodes.",
    )
    kv_listen: str = option(
        "",
        help="With --kv-connector tls: host:port to which peers send KV blocks, an address of "
        "this machine that they can reach; port 0: any free port; by default on loopback.",
    )
    kv_digests: bool | None = option(
        None,
        help="Check with keyed digests that KV blocks arrive unchanged; the same on all nodes. "
        "By default on if UCX_NET_DEVICES lets KV leave loopback.",
    )
    inject_faults: str = option(
        "",
        help="For drills: faults to inject in the KV connector, such as "
        "drop=0.01,delay=1ms-20ms,seed=3. Also: duplicate, reorder, alter, corrupt, fail_post "
        "(probabilities), kill=NAME:send:N or kill=NAME:recv:N (a message, or Write), poison=TEXT "
        "(the node ends when it computes a request whose id contains TEXT). @FILE: the faults "
        "that the file lists, reread when it changes; @FOLDER: the file in it that has the node's "
        "name.",
    )
    trace: TraceOptions = group(TraceOptions, without=("trace_ratio",))
    log: LogOptions = group(LogOptions)

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions(ProgramOptions):
    """Options of a node with an engine; a wrong value raises ConfigError with the field's name."""

    metrics_compat: str = option("none", choices=COMPAT_NAMES, help=COMPAT_HELP)
    served_model_name: str = option(
        "", help="Name of the model in metrics, as at the router; by default --model."
    )
    engine: EngineConfig = group(EngineConfig)
    adapter_root: str = option(
        "",
        help="Folder below which LoRA adapters may lie, with --max-adapters; the router says "
        "which. Empty: only installed packages and cached hub ids are loaded.",
    )
    adapters: tuple[str, ...] = option(
        (),
        name="adapter",
        help="[NAME=]SOURCE of an adapter to load at start: a folder or GGUF file below "
        "--adapter-root, an installed package, or a hub id in this machine's cache; repeat it for "
        "several. Others are loaded when a request needs them.",
    )
    weights_root: str = option(
        "",
        help="Folder below which new weights may lie for `baton admin weights update`. Empty: the "
        "node takes no new weights.",
    )

    fetch_prefixes: bool = option(
        False,
        help="Get cached parts of prompts from other nodes, such as earlier turns of a "
        "conversation, instead of computing them; on nodes of both roles with all ranks on one "
        "machine.",
    )
    fetch_timeout_s: float = option(
        2.0,
        above=0,
        most=MAX_PROMPT_WAIT_S,
        help="With --fetch-prefixes: how long a prompt waits for a cached prefix before this node "
        "computes the prompt, seconds.",
    )

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def vllm_model(self) -> str:
        """Return the model's name for metrics with vLLM's names; empty: show no such metrics."""
        return (self.served_model_name or self.model) if self.metrics_compat == "vllm" else ""
