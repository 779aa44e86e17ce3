"""`baton prefill`, `baton decode` and `baton encode`: run one node each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from baton.cli.config_file import program
from baton.processes.child_processes import THREAD_VARIABLES, use_one_heap
from baton.registry import Registry
from decode_node.options import DecodeNodeOptions
from encode_node.options import EncodeOptions
from node_runtime.options import ProgramOptions
from node_runtime.run_node import MakeProgram, run_node
from prefill_node.options import PrefillOptions

if TYPE_CHECKING:
    from baton.text.grammar_trials import EarlyGrammars

# Role -> function that makes the node; given as text, so that torch is not imported for --help.
_PROGRAMS: Registry[MakeProgram[Any]] = Registry(
    "node program",
    {
        "prefill": "prefill_node.program:make_program",
        "decode": "decode_node.program:make_program",
        "encode": "encode_node.program:make_program",
    },
)
_CHECKS: Registry[Callable[[Any], None]] = Registry(
    "check of a node",
    {
        "options": "node_runtime.option_checks:check_options",
        "model": "node_runtime.option_checks:check_model",
        "encode options": "node_runtime.option_checks:check_program_options",
        "encode model": "node_runtime.option_checks:check_vision_model",
    },
)
_EARLY: Registry[Callable[[str], EarlyGrammars | None]] = Registry(
    "early part of a node", {"grammars": "node_runtime.early_grammars:fork_early_grammars"}
)


@program
def prefill(options: PrefillOptions) -> None:
    """Compute prompts, push their KV blocks to decode nodes, sample the first token."""
    _run("prefill", options)


@program
def decode(options: DecodeNodeOptions) -> None:
    """Receive prompts' KV blocks from prefill nodes and decode in continuous batches."""
    _run("decode", options)


@program
def encode(options: EncodeOptions) -> None:
    """Encode images of prompts and send the encodings to prefill nodes.

    Loads only the vision encoder of the model. Prefill nodes need --encode-nodes.
    """
    _run("encode", options)


def _run(role: str, options: ProgramOptions) -> NoReturn:
    """Run a node of a role; wrong options are reported before torch is imported."""
    kind = "encode " if role == "encode" else ""

    def load() -> MakeProgram[Any]:
        _CHECKS.load(f"{kind}model")(options)
        return _PROGRAMS.load(role)

    _CHECKS.load(f"{kind}options")(options)
    for name, value in THREAD_VARIABLES.items():  # set before torch and NumPy are loaded
        os.environ.setdefault(name, value)
    use_one_heap()
    # The worker template must be forked before torch is imported, while this process has one
    # thread.
    grammars = None if kind else _EARLY.load("grammars")(options.model)
    raise typer.Exit(run_node(role, options, load, grammars))
