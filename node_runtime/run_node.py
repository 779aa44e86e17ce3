"""Runs the program of a node, from options to exit code; imports torch only to make the node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from baton.api.errors import ConfigError
from baton.processes.process import run_program
from node_runtime.options import ProgramOptions

if TYPE_CHECKING:
    from baton.link.words import NodeEvent
    from baton.text.grammar_trials import EarlyGrammars
    from node_runtime.node_program import NodeProgram

Options = TypeVar("Options", bound=ProgramOptions)
MakeProgram: TypeAlias = (
    "Callable[[Options, Callable[[NodeEvent], None], Callable[[Exception], None],"
    " EarlyGrammars | None], NodeProgram]"
)


def run_node(
    role: str,
    options: Options,
    load: Callable[[], MakeProgram[Options]],
    grammars: EarlyGrammars | None = None,
) -> int:
    """Run a node until it is told to stop; return the exit code.

    Args:
        role: the node's role, from which a name is made if the options have none.
        load: imports and returns the code that makes the node. It is called late, because it
            imports torch, and in a thread, because it may download the model.
        grammars: the parts that compile grammars, made before any thread started; None: the engine
            makes them later.
    """
    # Import here, so that `--help` is fast.
    from baton.access.access import Access
    from baton.access.audit_log import AuditLog
    from node_runtime.node_program import run_node_program

    made_up = f"{role}-{socket.gethostname()}-{os.getpid()}"
    options = replace(options, name=options.name or made_up)

    def make_node(
        emit: Callable[[NodeEvent], None], on_death: Callable[[Exception], None]
    ) -> NodeProgram:
        try:
            make_program = load()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed; a node needs: pip install 'baton-serve[node]'"
            ) from error
        return make_program(options, emit, on_death, grammars)

    async def main() -> None:
        await run_node_program(
            make_node,
            routers=options.routers,
            listen=options.listen,
            join_timeout_s=options.join_timeout_s,
            drain_timeout_s=options.drain_timeout_s,
            ready_with_peer=options.ready_with_peer,
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

    return run_program(main, options.log)
