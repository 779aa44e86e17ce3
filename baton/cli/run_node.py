"""Run a node program from its options to its exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from baton.access.exposure import split_address
from baton.access.tls_options import NO_TLS, TlsOptions
from baton.api.errors import ConfigError
from baton.decode_options import DecodeOptions
from baton.engine_config import EngineConfig
from baton.processes.process import run_program
from baton.push_mode import PushMode
from baton.registry import Registry

if TYPE_CHECKING:
    from baton.link.words import NodeEvent
    from baton.node_program import NodeProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of a prefill or decode node."""

    model: str
    name: str
    routers: tuple[str, ...]
    listen: str
    join_timeout_s: float
    kv_connector: str
    kv_listen: str
    engine: EngineConfig
    log_level: str
    log_format: str
    push: PushMode
    layer_groups: int
    kv_digests: bool | None
    inject_faults: str = ""
    drain_timeout_s: float = 0.0
    engine_timeout_s: float = 60.0
    node_token: str = field(default="", repr=False)
    metrics_listen: str = ""
    admin_token: str = field(default="", repr=False)
    api_keys_file: str = ""
    audit_log: str = ""
    tls: TlsOptions = NO_TLS
    insecure: bool = False
    decode: DecodeOptions = field(default_factory=DecodeOptions)  # a prefill node's are not read


MakeProgram: TypeAlias = (
    "Callable[[NodeOptions, Callable[[NodeEvent], None], Callable[[Exception], None]], NodeProgram]"
)


def run_node(options: NodeOptions, program: str) -> int:
    """Run a node until it is told to stop; returns the exit code.

    Args:
        program: ``"package.module:function"`` that makes it; imported late, as it needs torch.
    """
    # Imported here: who asks for help does not wait for it.
    from baton.access.access import Access
    from baton.access.audit_log import AuditLog
    from baton.checkpoint.model_folder import find_model_folder
    from baton.node_program import run_node_program

    def make_node(
        emit: Callable[[NodeEvent], None], on_death: Callable[[Exception], None]
    ) -> NodeProgram:
        # Before torch is imported: what the user got wrong is said at once.
        for router in options.routers:
            split_address("router", router)
        split_address("listen", options.listen)
        if options.metrics_listen:
            split_address("metrics_listen", options.metrics_listen)
        if options.kv_listen:
            split_address("kv_listen", options.kv_listen)
            if options.kv_connector != "tls":
                raise ConfigError(
                    f"kv_listen: only --kv-connector tls listens, not {options.kv_connector}"
                )
        find_model_folder(options.model)
        programs: Registry[MakeProgram] = Registry("node program", {"node": program})
        try:
            make_program = programs.load("node")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed; a node needs: pip install 'baton-serve[node]'"
            ) from error
        return make_program(options, emit, on_death)

    async def main() -> None:
        await run_node_program(
            make_node,
            routers=options.routers,
            listen=options.listen,
            join_timeout_s=options.join_timeout_s,
            drain_timeout_s=options.drain_timeout_s,
            engine_timeout_s=options.engine_timeout_s,
            node_token=options.node_token,
            metrics_listen=options.metrics_listen,
            access=Access(
                keys_file=Path(options.api_keys_file) if options.api_keys_file else None,
                admin_token=options.admin_token,
                audit=AuditLog(options.audit_log, program=options.name),
                by_certificate=options.tls.verifies_clients,
            ),
            tls=options.tls,
            insecure=options.insecure,
        )

    return run_program(main, log_level=options.log_level, log_format=options.log_format)
