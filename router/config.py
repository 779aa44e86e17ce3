"""RouterConfig: the options of a router, and checks of their values."""

from __future__ import annotations

from dataclasses import dataclass

from baton.access.access_options import AUDIT_LOG_HELP, INSECURE_HELP, STANDARD_OUTPUT
from baton.access.tls_options import TlsOptions
from baton.addresses import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from baton.api.errors import ConfigError
from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.options import check_limits, group, option
from baton.telemetry.compat_options import COMPAT_HELP, COMPAT_NAMES
from baton.telemetry.log_options import LogOptions
from baton.telemetry.trace_options import TraceOptions
from router.connection_budget import ConnectionOptions
from router.gate.admission_options import AdmissionOptions
from router.gate.scaling_options import ScalingOptions
from router.intake.images.image_options import ImageOptions
from router.intake.text_options import TextOptions
from router.policies import POLICIES

DRAIN_DELAY_S = 5.0  # seconds that load balancers need to notice that the router is not ready
_CERTS = "--tls-require-client-certs"
_KEYS = "--api-keys-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of the router; a wrong value raises ConfigError, which names the field."""

    model: str = option(
        further="more_models",
        help="Model folder, GGUF file, or hub id; weights are not read. Repeat it for more base "
        "models, each with nodes of its own.",
    )
    more_models: tuple[str, ...] = ()
    listen: str = option(DEFAULT_ADDRESS, help="host:port to serve on.")
    policy: str = option(
        "cost", choices=tuple(POLICIES.names()), help="Policy that chooses nodes for requests."
    )
    local_prefill: bool = option(
        True,
        help="With the cost policy: let a decode node compute a prompt itself if that is clearly "
        "faster, or if there is no prefill node.",
    )
    request_timeout_s: float = option(
        600.0, above=0, help="Deadline of calls that set none, seconds."
    )
    max_request_timeout_s: float = option(
        3600.0, above=0, help="Longest deadline that a client may set, seconds."
    )
    max_attempts: int = option(
        3,
        least=1,
        help="Most attempts for a request, on other nodes if there are any. Attempts that end "
        "because a node is lost (at most 10) or short of memory (at most 20) do not count. "
        "While nodes cannot reach each other, attempts go on for 15 s, with pauses, unless "
        "this is 1.",
    )
    pair_timeout_s: float = option(
        5.0,
        least=0,
        help="How long a request waits for a pair of nodes if there is none, seconds. Until a "
        "node of each role has joined, a request fails at once, except right after the router's "
        "start (--join-grace-s).",
    )
    join_grace_s: float = option(
        10.0,
        least=0,
        help="Seconds after the router's start in which requests and operators' commands wait for "
        "nodes that have not joined yet. Nodes join a router that was started again within about "
        "two seconds. 0: requests fail at once.",
    )
    return_timeout_s: float = option(
        60.0,
        least=0.0,
        help="How long a request waits for a node that went away by itself, if no other pair is "
        "there, seconds: the link may come back, or the process may be restarted. At most 1,024 "
        "requests wait at once.",
    )
    node_timeout_s: float = option(
        1.0,
        least=2 * BEAT_INTERVAL_S,  # two beats
        help="Silence after which a node with requests counts as lost, seconds. Idle nodes may be "
        "silent for longer.",
    )
    engine_timeout_s: float = option(
        10.0,
        least=0.5,
        help="A node that still beats gets no more requests once its engine or KV connector has "
        "been in one step for this long, seconds, and three times longer than in any step "
        "before. Its requests go to other nodes of its role.",
    )
    admission: AdmissionOptions = group(AdmissionOptions)
    scaling: ScalingOptions = group(ScalingOptions)
    node_token: str = option(
        "",
        is_secret=True,
        help="Token that lets nodes join, like a key with the role join, but without a file. If "
        "this, --admin-token or --api-keys-file is given, callers without a token or key are "
        "refused.",
    )
    admin_token: str = option(
        "",
        is_secret=True,
        help="Token of operators, like a key with the roles infer, look and operate, but without a "
        "file. Without any key anybody may look, and may also make changes if only this "
        "machine can reach the router.",
    )
    node_listen: str = option(
        "", help="host:port for nodes and `baton admin`, if it differs from the public one."
    )
    reuse_port: bool = option(
        False,
        help="Share the public port with other routers, each with its own --node-listen; the "
        "system divides connections among them.",
    )
    resume_grace_s: float = option(
        10.0, least=0, help="How long a resumable request that nobody reads is kept, seconds."
    )
    http_listen: str = option(
        DEFAULT_HTTP_ADDRESS, help='host:port of the OpenAI-compatible HTTP API; "": none.'
    )
    http_cors_origin: str = option(
        "", help='Origin whose web pages may call the HTTP API; "*": any.'
    )
    served_model_name: str = option(
        "",
        further="more_served_names",
        help="Name of the model for clients; by default --model. With several models: NAME=MODEL, "
        "with MODEL as in --model.",
    )
    more_served_names: tuple[str, ...] = ()
    served_model_aliases: str = option(
        "", help="More names of the model for clients, separated by commas."
    )
    names_file: str = option(
        "",
        help="TOML file with a table per served name: model, adapter, adapter_source, "
        "pins_adapter, request_defaults and chat_template. "
        "If it exists, options for names have no effect. `baton admin names` writes "
        "its changes there.",
    )
    adapter_root: str = option(
        "",
        help="Folder of LoRA adapters, as on the nodes; the router reads their digests there. "
        "Empty: `baton admin adapters load` must give digests of folders.",
    )
    adapters: tuple[str, ...] = option(
        (),
        name="adapter",
        help="NAME=SOURCE: another name of the model, with an adapter: a folder or GGUF file below "
        "--adapter-root, an installed package, or a hub id in the machines' caches; repeat it for "
        "several. With several models NAME=SOURCE=MODEL, with a MODEL of --model or "
        "--served-model-name.",
    )
    request_defaults: str = option(
        "",
        help="Defaults of HTTP requests, such as temperature=0.7,max_tokens=4096: temperature, "
        "top_k, top_p, min_p, repetition_penalty, max_tokens; and max_tokens_limit, which limits "
        "every output. NAME:temperature=0.2;OTHER:... for one of the served names.",
    )
    strict_fields: bool = option(
        False,
        help="Refuse HTTP requests with fields that have no effect here, instead of naming these "
        "fields in a header of the answer (X-Baton-Ignored-Fields).",
    )
    texts: TextOptions = group(TextOptions)
    images: ImageOptions = group(ImageOptions)
    api_keys_file: str = option(
        "",
        help="TOML file with a table per key (baton keys new): who may call what, over gRPC and "
        "HTTP. Reloaded on SIGHUP.",
    )
    audit_log: str = option(STANDARD_OUTPUT, help=AUDIT_LOG_HELP)
    tls: TlsOptions = group(TlsOptions)
    insecure: bool = option(False, help=INSECURE_HELP)
    connections: ConnectionOptions = group(ConnectionOptions)
    drain_delay_s: float | None = option(
        None,
        least=0,
        help="Time for which a router that is told to stop goes on serving while it reports not "
        "ready, seconds, so that load balancers notice. By default 5 if other machines can "
        "call, else 0.",
    )
    drain_timeout_s: float = option(
        20.0,
        least=0,
        help="Time after --drain-delay-s for open requests to end, seconds; no new requests are "
        "taken. A second signal ends the process at once.",
    )
    memory_limit_mib: int = option(
        0,
        least=0,
        help="Requests are refused when the process's memory comes near this, MiB. 0: the limit of "
        "the control group, or the machine.",
    )
    cache_salt_secret_file: str = option(
        "",
        help="File with a secret of 16 bytes or more, from which each tenant's cache salt is "
        "made; the same for all routers of a fleet. By default each start draws a new one: "
        "tenants then find their cached prefixes through this router only, until it ends.",
    )
    log_prompts: bool = option(
        False,
        help="Log the first 2,000 characters of each prompt and each output. They are your users' "
        "texts: whoever reads the log reads them. Otherwise no log line contains any of these "
        "texts.",
    )
    access_log: bool = option(True, help="Log a line for each request when it ends.")
    metrics_compat: str = option("none", choices=COMPAT_NAMES, help=COMPAT_HELP)
    trace: TraceOptions = group(TraceOptions)
    log: LogOptions = group(LogOptions)

    def __post_init__(self) -> None:
        check_limits(self)
        self.tls.check_server()
        if not self.max_request_timeout_s >= self.request_timeout_s:
            raise ConfigError(
                f"max_request_timeout_s: must be request_timeout_s ({self.request_timeout_s:g}) "
                f"or more, got {self.max_request_timeout_s:g}"
            )
        if self.reuse_port and not self.node_listen:
            raise ConfigError(
                "reuse_port: needs node_listen, or nodes would join any one of the processes"
            )

    @property
    def models(self) -> tuple[str, ...]:
        """All base models, as the options ``model`` and ``more_models`` name them."""
        return (self.model, *self.more_models)

    def may_self_prefill(self, policy: str) -> bool:
        """Return whether decode nodes may compute prompts themselves under this routing policy."""
        # other policies always choose a prefill node and a decode node
        return self.local_prefill and policy == "cost"


def drain_delay_s(config: RouterConfig) -> float:
    """Return for how many seconds a stopping router still serves while it reports not ready."""
    from baton.access.exposure import is_public  # imported here, so that `--help` is fast

    if config.drain_delay_s is not None:
        return config.drain_delay_s
    listens = filter(None, (config.listen, config.http_listen))
    return DRAIN_DELAY_S * any(is_public("listen", listen) for listen in listens)


def requires_client_certs(config: RouterConfig, listen: str) -> bool:
    """Return whether the gRPC listener at this address requires client certificates.

    gRPC either requires certificates or ignores them. A separate address for nodes and operators
    requires certificates if the router has a CA to verify them. A shared address requires
    certificates only if the options say so, because clients may use keys instead.
    """
    is_private = bool(config.node_listen) and listen == config.node_listen
    return config.tls.require_client_certs or (is_private and config.tls.verifies_clients)


def check_exposure(config: RouterConfig) -> None:
    """Raise ConfigError if other machines can reach a listener that is not protected."""
    from baton.access.exposure import Exposure  # imported here, so that `--help` is fast

    tls = config.tls
    # One API key is enough: callers without a key then have no rights (`baton/access/access.py`).
    has_keys = bool(config.api_keys_file or config.node_token or config.admin_token)

    def check(option: str, listen: str, authentication: str, is_authenticated: bool) -> None:
        Exposure(
            authentication=authentication,
            is_authenticated=is_authenticated,
            is_encrypted=bool(tls.cert),
            insecure=config.insecure,
        ).check(option, listen)

    check("listen", config.listen, f"{_KEYS} or {_CERTS}", tls.require_client_certs or has_keys)
    check(
        "node_listen", config.node_listen, f"{_KEYS} or --tls-ca", tls.verifies_clients or has_keys
    )
    check(
        "http_listen",
        config.http_listen,
        f"{_KEYS} or {_CERTS}",
        tls.require_client_certs or has_keys,
    )
