"""Options of simulated nodes (sizes and timing), and the model that they pretend to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.access.tls_options import ONLY_ROUTERS, TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.kv.block_hash import DEFAULT_HASH_ALGORITHM, HASH_ALGORITHMS
from baton.limits import REVISION_HELP, parse_revision
from baton.options import check_limits, group, option
from baton.telemetry.log_options import LogOptions
from sim_node.sim_model import OutputSource
from sim_node.timing import PRESETS, TimingModel, preset

DEFAULT_PRESET = "h100-8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """Options of all nodes of a process; a wrong value raises ConfigError with the field's name."""

    timing: TimingModel = field(default_factory=lambda: PRESETS[DEFAULT_PRESET])
    block_size: int = option(16, least=1, help="Tokens per KV block.")
    num_blocks: int = option(26_000, least=1, help="KV blocks per node.")
    max_model_len: int = option(
        0, least=0, help="Most tokens of a request; 0: the model's own limit."
    )
    max_num_requests: int = option(256, least=1, help="Most requests in a decode batch.")
    max_num_batched_tokens: int = option(
        8192, least=1, help="Most prompt tokens in a prefill step."
    )
    prefill_tokens_beside_decodes: int = option(
        0, least=0, help="Most prompt tokens in a step that also decodes; 0: as in other steps."
    )
    local_prefill_threshold: int = option(
        32,
        least=0,
        help="A decode node computes the rest of a prompt itself if its prefix cache lacks at "
        "most this many tokens; 0: never.",
    )
    prefix_hash: str = option(
        DEFAULT_HASH_ALGORITHM,
        choices=tuple(HASH_ALGORITHMS),
        help="Hash that identifies prefixes.",
    )
    revision: str = option("", parse=parse_revision, help=REVISION_HELP)

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimNodeOptions:
    """Options of `baton sim-node`; a wrong value raises ConfigError with the field's name."""

    model: str = option(help="Model folder, GGUF file, or hub id; weights are not read.")
    router: str = option(DEFAULT_ADDRESS, help="host:port of the router.")
    prefill: int = option(1, least=0, help="Number of prefill nodes in this process.")
    decode: int = option(1, least=0, help="Number of decode nodes in this process.")
    name: str = option("sim", help="Beginning of the nodes' names: NAME-p0, NAME-d0, ...")
    preset: str = option(
        DEFAULT_PRESET, choices=tuple(PRESETS), help="Model and hardware whose times are simulated."
    )
    time_scale: float = option(
        1.0, above=0, help="Factor for the preset's times; 0.1: ten times as fast."
    )
    sizes: SimOptions = group(SimOptions)
    script: str = option(
        "",
        help="TOML file that tells which outputs follow which prompts; empty: outputs are hashes "
        "of the prompt.",
    )
    faults: str = option(
        "",
        help="Faults to inject, such as kill=0.5,restart_s=3,stall=0.5,stall_s=2 (per node and "
        "minute), slow=0.1,slow_factor=3 (share of nodes), refuse=0.01 (probability), seed=1.",
    )
    join_timeout_s: float = option(
        30.0, least=0, help="How long to try to reach the router at start, seconds."
    )
    node_token: str = option(
        "",
        is_secret=True,
        help="Proof for the router that these nodes may join: its --node-token, or an API key "
        "with the role join.",
    )
    tls: TlsOptions = group(TlsOptions, without=ONLY_ROUTERS)
    log: LogOptions = group(LogOptions)

    def __post_init__(self) -> None:
        check_limits(self)

    def node_sizes(self) -> SimOptions:
        """Return the sizes of each node, with the timing of the named preset."""
        return replace(self.sizes, timing=preset(self.preset).scaled(self.time_scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """The model that a node pretends to serve.

    Attributes:
        identity: properties that decide the model's tokens, such as digests of its files, by name;
            the node reports them to routers.
        max_model_len: maximum number of tokens of a request.
        outputs: source of output tokens; None: `HashedOutputs`.
    """

    identity: Mapping[str, str]
    vocab_size: int
    max_model_len: int
    outputs: OutputSource | None = None
