"""`baton router`: the options of the program."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from baton.access.audit_log import HELP as AUDIT_LOG_HELP
from baton.access.audit_log import STANDARD_OUTPUT
from baton.access.tls_options import TlsOptions
from baton.addresses import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from baton.cli.command_line import CommandLine
from baton.cli.log_options import LogFormatOption, LogLevelOption
from baton.cli.text_options import (
    ChatTemplateOption,
    GenerationConfigOption,
    ServedModelNameOption,
)
from baton.cli.tls_options import (
    InsecureOption,
    RequireClientCertsOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
)
from baton.processes.process import run_program
from router.connection_budget import ConnectionOptions
from router.gate.admission_options import AdmissionOptions
from router.intake.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from router.policies import POLICIES

ADMISSION = AdmissionOptions()
CONNECTIONS = ConnectionOptions()

app = CommandLine(add_completion=False)


@app.command()
def router(
    model: Annotated[
        str, typer.Option(help="Model folder, GGUF file, or hub id; weights are not read.")
    ],
    listen: Annotated[str, typer.Option(help="host:port to serve on.")] = DEFAULT_ADDRESS,
    policy: Annotated[
        str, typer.Option(help=f"Routing policy: {', '.join(POLICIES.names())}.")
    ] = "cost",
    local_prefill: Annotated[
        bool,
        typer.Option(
            help="With the cost policy: let a decode node compute a prompt itself when that is "
            "clearly faster, or when there is no prefill node."
        ),
    ] = True,
    request_timeout_s: Annotated[
        float, typer.Option(help="Deadline of calls that come without one, seconds.")
    ] = 600.0,
    max_attempts: Annotated[
        int,
        typer.Option(
            help="A request is tried so often, on other nodes where there are any. Attempts that "
            "end because a node is lost or short of memory do not count (10 and 20 may); while "
            "nodes do not reach each other there are more, with pauses, for 15 s (1: none)."
        ),
    ] = 3,
    pair_timeout_s: Annotated[
        float,
        typer.Option(
            help="How long a request waits for a pair of nodes when there is none, seconds. As "
            "long as no node of a role has ever joined it fails at once."
        ),
    ] = 5.0,
    node_timeout_s: Annotated[
        float,
        typer.Option(help="A node that says nothing for so long is lost, seconds."),
    ] = 1.0,
    engine_timeout_s: Annotated[
        float,
        typer.Option(
            help="A node that beats while its engine or its KV connector has been in one step for "
            "so long, and three times longer than ever, gets nothing more, and its requests go to "
            "others of its kind, seconds.",
            min=0.5,
        ),
    ] = 10.0,
    max_queued_requests: Annotated[
        int,
        typer.Option(
            help="Requests that wait while the nodes have all that they can take; then the least "
            "urgent one of the tenant that waits for most is refused. 0: no limit."
        ),
    ] = ADMISSION.max_queued_requests,
    max_open_requests: Annotated[
        int, typer.Option(help="Requests that wait or are in progress; 0: no limit.")
    ] = ADMISSION.max_open_requests,
    max_open_requests_per_client: Annotated[
        int, typer.Option(help="The same, of one client; 0: no limit.")
    ] = ADMISSION.max_open_requests_per_client,
    max_ttft_s: Annotated[
        float,
        typer.Option(
            help="A request whose first token is expected later than this is refused at once, "
            "seconds; 0: no limit but its deadline."
        ),
    ] = ADMISSION.max_ttft_s,
    prefill_window_s: Annotated[
        float,
        typer.Option(
            help="Seconds of work that each prefill node may have before it; what is more waits "
            "in the router, by priority."
        ),
    ] = ADMISSION.prefill_window_s,
    shared_prefill_window_s: Annotated[
        float,
        typer.Option(
            help="The same while several tenants ask for something, of those that have much before "
            "the nodes already: what another tenant's next request may have to wait for."
        ),
    ] = ADMISSION.shared_prefill_window_s,
    node_token: Annotated[
        str,
        typer.Option(
            help="What nodes may bring to join: a key with the role join and no file. With this, "
            "--admin-token or --api-keys-file nothing is open to who brings none of them.",
        ),
    ] = "",
    admin_token: Annotated[
        str,
        typer.Option(
            help="What operators may bring: a key with the roles infer, look and operate, and no "
            "file. Without any key anybody may look, and change something if only this machine "
            "can reach the router.",
        ),
    ] = "",
    node_listen: Annotated[
        str,
        typer.Option(
            help="host:port for nodes and `baton admin`, when it is not to be that of the public."
        ),
    ] = "",
    reuse_port: Annotated[
        bool,
        typer.Option(
            help="Share the public port with other routers, each with its own --node-listen; "
            "the system gives each a part of the connections."
        ),
    ] = False,
    resume_grace_s: Annotated[
        float,
        typer.Option(help="A resumable request that nobody reads is kept for so long, seconds."),
    ] = 10.0,
    http_listen: Annotated[
        str, typer.Option(help='host:port of the OpenAI-compatible HTTP API; "": none.')
    ] = DEFAULT_HTTP_ADDRESS,
    http_cors_origin: Annotated[
        str,
        typer.Option(help='Web pages of this origin may call the HTTP API; "*": of all.'),
    ] = "",
    served_model_name: ServedModelNameOption = "",
    strict_fields: Annotated[
        bool,
        typer.Option(
            help="Refuse HTTP requests with fields that have no effect here, instead of naming "
            "these in a header of the answer (X-Baton-Ignored-Fields)."
        ),
    ] = False,
    chat_template: ChatTemplateOption = "",
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Let HTTP requests bring a chat template of their own (chat_template). It runs in "
            "Jinja's sandbox, in a process with limits; still, it is a program.",
        ),
    ] = False,
    generation_config: GenerationConfigOption = "auto",
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: auto (by its chat template), none, "
            f"{', '.join(TOOL_CALL_PARSERS.names())}."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes its reasoning: auto (by its chat template), none, "
            f"{', '.join(REASONING_PARSERS.names())}."
        ),
    ] = "auto",
    api_keys_file: Annotated[
        str,
        typer.Option(
            help="TOML, a table per key (baton keys new): who may call, over gRPC and HTTP, and "
            "what. Read again on SIGHUP.",
        ),
    ] = "",
    audit_log: Annotated[str, typer.Option(help=AUDIT_LOG_HELP)] = STANDARD_OUTPUT,
    tls_cert: TlsCertOption = "",
    tls_key: TlsKeyOption = "",
    tls_ca: TlsCaOption = "",
    tls_require_client_certs: RequireClientCertsOption = False,
    insecure: InsecureOption = False,
    max_request_timeout_s: Annotated[
        float,
        typer.Option(help="A deadline of a client's own is at most this far away, seconds."),
    ] = 3600.0,
    max_connections: Annotated[
        int,
        typer.Option(
            help="Of clients, over each API. When there are so many, those that wait for a request "
            "make way for new ones. 0: as the limit of descriptors allows, at most 10,000."
        ),
    ] = CONNECTIONS.max_connections,
    max_connections_per_address: Annotated[
        int,
        typer.Option(
            help="Of these from one address, over HTTP. All clients behind one proxy share its "
            "address. 0: half of them."
        ),
    ] = CONNECTIONS.max_connections_per_address,
    header_timeout_s: Annotated[
        float,
        typer.Option(
            help="For a new connection's first request to come, with what TLS needs, seconds."
        ),
    ] = CONNECTIONS.header_timeout_s,
    idle_timeout_s: Annotated[
        float, typer.Option(help="A connection without a request is closed after it, seconds.")
    ] = CONNECTIONS.idle_timeout_s,
    stall_timeout_s: Annotated[
        float,
        typer.Option(
            help="A client that takes nothing of its stream for so long is cut off, and its "
            "request ended, seconds."
        ),
    ] = CONNECTIONS.stall_timeout_s,
    drain_delay_s: Annotated[
        float | None,
        typer.Option(
            help="When it is told to stop: be not ready, but serve on for so long, so that load "
            "balancers hear of it. 5 where other machines can call, else 0, if not given.",
            show_default=False,
        ),
    ] = None,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            help="Then take no new requests, and give the open ones so long to end, seconds. A "
            "second signal ends the process at once."
        ),
    ] = 20.0,
    memory_limit_mib: Annotated[
        int,
        typer.Option(
            help="Near it requests are refused. 0: the limit of the control group, or the machine."
        ),
    ] = 0,
    cache_salt_secret_file: Annotated[
        str,
        typer.Option(
            help="A secret of 16 bytes or more, of which each tenant's cache salt is made; give "
            "all routers of a fleet the same. If not given it is drawn at each start: tenants "
            "then find what they have cached on nodes through this router only, until it ends.",
        ),
    ] = "",
    access_log: Annotated[
        bool, typer.Option(help="A line in the log for each request, when it has ended.")
    ] = True,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
) -> None:
    """Serve the public API and place requests on prefill and decode nodes."""

    text_options: dict[str, Any] = {
        "chat_template": chat_template,
        "trust_request_chat_template": trust_request_chat_template,
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "generation_config": generation_config,
    }

    def run() -> Coroutine[None, None, None]:
        # Imported here: who asks for help does not wait for it.
        from router.config import RouterConfig
        from router.intake.text_options import TextOptions
        from router.program import serve

        return serve(
            RouterConfig(
                model=model,
                listen=listen,
                policy=policy,
                local_prefill=local_prefill,
                request_timeout_s=request_timeout_s,
                max_attempts=max_attempts,
                pair_timeout_s=pair_timeout_s,
                node_timeout_s=node_timeout_s,
                engine_timeout_s=engine_timeout_s,
                admission=AdmissionOptions(
                    max_queued_requests=max_queued_requests,
                    max_open_requests=max_open_requests,
                    max_open_requests_per_client=max_open_requests_per_client,
                    max_ttft_s=max_ttft_s,
                    prefill_window_s=prefill_window_s,
                    shared_prefill_window_s=shared_prefill_window_s,
                ),
                node_token=node_token,
                admin_token=admin_token,
                node_listen=node_listen,
                reuse_port=reuse_port,
                resume_grace_s=resume_grace_s,
                http_listen=http_listen,
                http_cors_origin=http_cors_origin,
                served_model_name=served_model_name,
                strict_fields=strict_fields,
                texts=TextOptions(**text_options),
                api_keys_file=api_keys_file,
                audit_log=audit_log,
                access_log=access_log,
                tls=TlsOptions(
                    cert=tls_cert,
                    key=tls_key,
                    ca=tls_ca,
                    require_client_certs=tls_require_client_certs,
                ),
                insecure=insecure,
                connections=ConnectionOptions(
                    max_connections=max_connections,
                    max_connections_per_address=max_connections_per_address,
                    header_timeout_s=header_timeout_s,
                    idle_timeout_s=idle_timeout_s,
                    stall_timeout_s=stall_timeout_s,
                ),
                max_request_timeout_s=max_request_timeout_s,
                drain_delay_s=drain_delay_s,
                drain_timeout_s=drain_timeout_s,
                memory_limit_mib=memory_limit_mib,
                cache_salt_secret_file=cache_salt_secret_file,
            )
        )

    raise typer.Exit(run_program(run, log_level=log_level, log_format=log_format))


if __name__ == "__main__":
    app(prog_name="baton router")
