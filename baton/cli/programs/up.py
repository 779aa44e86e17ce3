"""`baton up`: its options, and the arguments of the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.access.access_options import INSECURE_HELP
from baton.addresses import DEFAULT_ADDRESS
from baton.api.errors import ConfigError
from baton.cli.command_line import takes_all_options
from baton.cli.config_file import PROGRAMS, file_of, passed_on, program, read_config_file
from baton.cli.declared import by_name
from baton.cli.programs.passed_words import divide_words, passed_words_of
from baton.options import check_limits, option, parse_bytes, same_option
from prefill_node.options import PrefillOptions
from router.config import RouterConfig

if TYPE_CHECKING:
    from baton.deployment.local_deployment import LocalDeploymentConfig

_FOR_ROUTER = (
    "policy", "served_model_name", "served_model_aliases", "names_file", "request_defaults",
    "chat_template", "generation_config", "tool_call_parser", "reasoning_parser", "image_hosts",
    "api_keys_file", "adapter", "adapter_root",
)  # fmt: skip
_FOR_NODES = (
    "dtype", "kv_cache_dtype", "kv_cache_memory", "executor", "speculative_method",
    "speculative_model", "adapter_root",
)  # fmt: skip
_MAX_ADAPTERS = 8  # slots per node if a folder of adapters is given


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `baton up`; raises ConfigError naming the field."""

    model: str = option(
        further="more_models",
        help="Model folder, GGUF file, or hub id. Repeat it for more base models: each has nodes "
        "of its own, all share the machine's cores, and --kv-cache-memory is divided among "
        "them.",
    )
    more_models: tuple[str, ...] = ()
    prefill: int = option(
        1, least=0, help="Number of prefill nodes; 0: decode nodes compute prompts, too."
    )
    decode: int = option(
        1, least=0, help="Number of decode nodes; 0: embeddings, scores and labels only."
    )
    encode: int = option(
        0,
        least=0,
        help="Number of encode nodes, which encode images for the prefill nodes; 0: prefill nodes "
        "encode images.",
    )
    listen: str = option(DEFAULT_ADDRESS, help="host:port of the router.")
    http_listen: str = same_option(RouterConfig, "http_listen")
    served_model_name: str = same_option(RouterConfig, "served_model_name")
    more_served_names: tuple[str, ...] = ()
    served_model_aliases: str = same_option(RouterConfig, "served_model_aliases")
    names_file: str = same_option(RouterConfig, "names_file")
    request_defaults: str = same_option(RouterConfig, "request_defaults")
    chat_template: str = same_option(RouterConfig, "chat_template")
    generation_config: str = same_option(RouterConfig, "generation_config")
    tool_call_parser: str = same_option(RouterConfig, "tool_call_parser")
    reasoning_parser: str = same_option(RouterConfig, "reasoning_parser")
    image_hosts: str = same_option(RouterConfig, "image_hosts")
    policy: str = same_option(RouterConfig, "policy")
    api_keys_file: str = same_option(RouterConfig, "api_keys_file")
    adapter_root: str = option(
        "", help="Folder of LoRA adapters that may be loaded, for the router and all nodes."
    )
    adapter: tuple[str, ...] = same_option(RouterConfig, "adapter")
    max_adapters: int | None = option(
        None,
        least=1,
        help="Most LoRA adapters in each node's memory; by default 8 with --adapter-root or "
        "--adapter, else none.",
    )
    dtype: str = same_option(PrefillOptions, "dtype")
    kv_cache_dtype: str = same_option(PrefillOptions, "kv_cache_dtype")
    kv_cache_memory: str = same_option(PrefillOptions, "kv_cache_memory")
    executor: str = same_option(PrefillOptions, "executor")
    speculative_method: str = same_option(PrefillOptions, "speculative_method")
    speculative_model: str = same_option(PrefillOptions, "speculative_model")
    ray_address: str = option(
        "",
        help="Ray cluster that places the nodes and their ranks on its machines, such as auto or "
        "HOST:6379; implies --executor ray. Empty: with --executor ray, the cluster of "
        "RAY_ADDRESS, or a new one on this machine.",
    )
    lend_cores: bool = option(
        True,
        help="On a CPU, let nodes compute on each other's cores while these are idle.",
    )
    router_args: str = option("", help="More options of the router, as one string.")
    node_args: str = option(
        "", help="More options of every prefill and decode node, as one string."
    )
    prefill_args: str = option("", help="More options of every prefill node, as one string.")
    decode_args: str = option("", help="More options of every decode node, as one string.")
    encode_args: str = option(
        "",
        help="More options of every encode node, as one string. Encode nodes also get "
        "--kv-connector, --kv-digests, --dtype and --revision of the prefill nodes.",
    )
    log_folder: str = option("", help="Folder for logs; a temporary folder if not given.")
    admin_token: str = option(
        "", is_secret=True, help="Token that admin calls must bring; empty: none."
    )
    tls_folder: str = option(
        "",
        help="Folder of certificates as `baton certs dev` makes them (ca.crt, router.crt, "
        "router.key, p0.crt, d0.crt, operator.crt, ...); clients then need a certificate, too. No "
        "TLS if not given.",
    )
    insecure: bool = option(False, help=INSECURE_HELP)
    drain_timeout_s: float = option(
        10.0,
        least=0,
        help="Time for open requests to end when this is stopped, seconds; a second Ctrl-C ends "
        "it at once.",
    )
    ready_timeout_s: float = option(
        120.0, above=0, help="Time for all nodes to become ready, seconds."
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.prefill + self.decode:
            raise ConfigError("decode: must be 1 or more, got 0")
        if self.encode and not self.prefill:
            raise ConfigError("prefill: must be 1 or more with --encode, got 0")


_Words = Annotated[
    list[str],
    typer.Argument(
        help="Model folder, GGUF file, or hub id, in place of --model.",
        metavar="MODEL",
        callback=divide_words,
        is_eager=True,  # the models become the default of --model
        expose_value=False,
    ),
]


@program
@takes_all_options
def up(options: UpOptions, context: typer.Context, model_words: _Words = []) -> None:  # noqa: B006  # Typer's form
    """Start a router, prefill and decode nodes on this machine; Ctrl-C stops all of them.

    All options of the router and of nodes can be given, too: an option goes to each program that
    has it. The machine's cores are divided between the nodes. All processes read --config. With
    Ray, the nodes run on the machines that Ray chooses.
    """
    # Import here, so that `--help` is fast.
    from baton.cli.programs.run_up import run_up

    words = passed_words_of(context)
    if words.models and words.models != (options.model, *options.more_models):
        raise ConfigError("model: must be given as MODEL or with --model, not both")
    config = _deployment(options, context, words.by_program)
    raise typer.Exit(run_up(config, ready_timeout_s=options.ready_timeout_s))


def _deployment(
    options: UpOptions, context: typer.Context, passed: Mapping[str, Sequence[str]]
) -> LocalDeploymentConfig:
    """Return the deployment's configuration; raises CommandError for a bad file.

    Args:
        passed: program -> arguments that are options of the program, and not of `baton up`.
    """
    from baton.deployment.local_deployment import LocalDeploymentConfig

    path = file_of(context)
    file_args = ["--config", str(path)] if path is not None else []
    with_ray = options.executor == "ray" or bool(options.ray_address)
    by_ray = ["--executor", "ray"] if with_ray and options.executor == "auto" else []
    return LocalDeploymentConfig(
        model=options.model,
        more_models=options.more_models,
        listen=options.listen,
        http_listen=options.http_listen,
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_encode=options.encode,
        router_args=[
            # The user's arguments come last, because the last value of a repeated option is used.
            *(*file_args, *_keys_in(path), *passed_on(context, _FOR_ROUTER)),
            *(*passed["router"], *options.router_args.split()),
        ],
        node_args=[
            *(*file_args, *passed_on(context, _FOR_NODES), *_kv_memory(options), *by_ray),
            *_adapter_slots(options),
            *options.node_args.split(),
        ],
        prefill_args=[*passed["prefill"], *options.prefill_args.split()],
        decode_args=[*passed["decode"], *options.decode_args.split()],
        encode_args=[*file_args, *passed["encode"], *options.encode_args.split()],
        log_folder=Path(options.log_folder) if options.log_folder else None,
        admin_token=options.admin_token,
        tls_folder=Path(options.tls_folder) if options.tls_folder else None,
        insecure=options.insecure,
        drain_timeout_s=options.drain_timeout_s,
        ray_address=options.ray_address if with_ray else None,
        lend_cores=options.lend_cores,
    )


def _adapter_slots(options: UpOptions) -> list[str]:
    """Return the nodes' argument for their number of adapter slots; empty if they hold none."""
    if options.max_adapters is None and not (options.adapter_root or options.adapter):
        return []
    return ["--max-adapters", str(options.max_adapters or _MAX_ADAPTERS)]


def _kv_memory(options: UpOptions) -> list[str]:
    """Return the nodes' argument for the KV memory of each of several base models.

    If the user gives no KV memory, the result is empty, and each node measures at its start how
    much memory is free.
    """
    num_models = 1 + len(options.more_models)
    if num_models == 1 or options.kv_cache_memory == "auto":
        return []
    in_all = parse_bytes("kv_cache_memory", options.kv_cache_memory)
    return ["--kv-cache-memory", str(in_all // num_models)]


def _keys_in(path: Path | None) -> list[str]:
    """Return the router's argument for API keys if the configuration file names a key file.

    The deployment then knows that its nodes need keys, too.
    """
    if path is None:
        return []
    found = {
        name: read_config_file(path, name, by_name(PROGRAMS.load(name)))
        for name in ("router", "prefill", "decode")
    }
    keys = found["router"].get("api_keys_file")
    return ["--api-keys-file", keys.value] if keys is not None else []
