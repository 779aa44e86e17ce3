"""The options that only a decode node takes, and the command made of all its options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from baton.cli.node_options import node_command
from baton.cli.run_node import NodeOptions
from baton.decode_options import DecodeOptions

_DEFAULTS = DecodeOptions()


def decode_command(summary: str, program: str) -> Callable[..., None]:
    """The command of a decode node; see `node_command`."""

    def command(
        max_receiving_requests: Annotated[
            int, typer.Option(help="Most requests whose KV is on its way here at a time.")
        ] = _DEFAULTS.max_receiving_requests,
        max_receiving_tokens: Annotated[
            int,
            typer.Option(
                help="Most tokens whose KV is on its way here at a time, but for one request "
                "alone; others wait for their grant. 0: half of the KV cache."
            ),
        ] = _DEFAULTS.max_receiving_tokens,
        local_prefill_threshold: Annotated[
            int,
            typer.Option(
                help="Compute a request here, and receive nothing, if the prefix cache has all "
                "of it but at most this many tokens and it can begin at once. 0: never."
            ),
        ] = _DEFAULTS.local_prefill_threshold,
        preemption: Annotated[
            str,
            typer.Option(
                help="Of a request whose memory an older one needs: hand-back (the router places "
                "it again) or recompute (here, prompt included)."
            ),
        ] = "hand-back",
        **common: Any,
    ) -> None:
        def complete(options: NodeOptions) -> NodeOptions:
            return dataclasses.replace(
                options,
                engine=dataclasses.replace(options.engine, preemption=preemption),
                decode=DecodeOptions(
                    max_receiving_requests=max_receiving_requests,
                    max_receiving_tokens=max_receiving_tokens,
                    local_prefill_threshold=local_prefill_threshold,
                ),
            )

        node_command("decode", summary, program, complete)(**common)

    # One table of options: the common ones first.
    own = inspect.signature(command, eval_str=True)
    all_options = dict(inspect.signature(node_command("", "", ""), eval_str=True).parameters)
    all_options |= {name: option for name, option in own.parameters.items() if name != "common"}
    ordered = sorted(all_options.values(), key=lambda o: o.default is not inspect.Parameter.empty)
    command.__signature__ = own.replace(parameters=ordered)  # type: ignore[attr-defined]  # of functions
    command.__doc__ = summary
    return command
