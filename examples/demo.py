"""The demo behind `make demo`: three processes, real prompts, a receipt for each.

Starts a router, a prefill node and a decode node on this machine, streams a few completions of
the model in examples/demo_model, shows what the hand-off of each one cost, and stops everything.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from baton import BatonError, Client, Receipt, SamplingParams, TextDelta
from baton.cli.receipt_table import format_bytes
from baton.cli.run_up import wait_ready
from baton.client import Prompt
from baton.local_deployment import LocalDeployment, LocalDeploymentConfig

MODEL = Path(__file__).parent / "demo_model"
READY_TIMEOUT_S = 120.0


def prompts() -> list[tuple[str, str, Prompt]]:
    """(title, what to show of the prompt, the prompt)."""
    source = Path(json.__file__).with_name("encoder.py").read_text(encoding="utf-8")
    long_prompt = source[:2600].rpartition("\n")[0] + "\n"
    question = "Write the function `read_lines(path)`: Return the lines of a file."
    return [
        ("function", "def read_config(path):\n", "def read_config(path):\n"),
        (
            "class",
            'class Stack:\n    """A simple stack."""\n\n',
            'class Stack:\n    """A simple stack."""\n\n',
        ),
        ("long prompt", "... (the first 2,600 characters of a module)\n", long_prompt),
        ("chat", f"{question}\n", [{"role": "user", "content": question}]),
    ]


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL), help="model folder (default: the demo's)")
    parser.add_argument("--max-tokens", type=int, default=64, help="per completion (default: 64)")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    config = LocalDeploymentConfig(
        model=arguments.model,
        listen=_free_address(),
        node_args=["--kv-cache-memory", "256M", "--long-prefill-token-threshold", "256"],
    )
    try:
        console.print(Rule("starting router, prefill node (p0) and decode node (d0)"))
        with LocalDeployment(config) as deployment, Client(config.listen) as client:
            wait_ready(deployment, console, READY_TIMEOUT_S)
            params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
            receipts = []
            for title, shown, prompt in prompts():
                console.print()
                console.print(Rule(title))
                receipts.append((title, _stream(console, client, shown, prompt, params)))
    except BatonError as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    console.print()
    console.print(_receipt_table(receipts))
    console.print(
        "left after prefill: from token 1 sampled on p0 to all blocks complete in d0; "
        "computed on d0: prompt tokens that d0 had to compute",
        style="dim",
    )
    console.print("Every process has been stopped. Try [bold].venv/bin/baton --help[/].")
    return 0


def _stream(
    console: Console, client: Client, shown: str, prompt: Prompt, params: SamplingParams
) -> Receipt:
    """Print a completion as it comes; returns its receipt."""
    console.print(f"[dim]{escape(shown)}[/]", end="")
    last: TextDelta | None = None
    for last in client.stream(prompt, params):
        console.print(escape(last.text), end="", soft_wrap=True)
    console.print()
    assert last is not None
    assert last.receipt is not None
    return last.receipt


def _receipt_table(receipts: list[tuple[str, Receipt]]) -> Table:
    """One column per request; what p0 and d0 did for it."""
    table = Table(title="receipts", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    columns = []
    for title, receipt in receipts:
        table.add_column(title, justify="right", no_wrap=True)
        columns.append(_receipt_cells(receipt))
    names = (
        "prompt tokens",
        "output tokens",
        "TTFT",
        "time per token",
        "KV pushed to d0",
        "in blocks",
        "transport",
        "left after prefill",
        "computed on d0",
        "cached on d0",
    )
    for name, *cells in zip(names, *columns, strict=True):
        table.add_row(name, *cells)
    return table


def _receipt_cells(receipt: Receipt) -> list[str]:
    cells = [
        str(receipt.num_prompt_tokens),
        str(receipt.num_output_tokens),
        f"{receipt.ttft_s * 1e3:.0f} ms",
        f"{receipt.time_per_token_s * 1e3:.1f} ms",
    ]
    decode = receipt.decode
    if decode is None:  # the output ended with token 1, on p0
        return cells + ["-"] * 6
    return [
        *cells,
        format_bytes(decode.push.num_bytes),
        str(decode.push.num_blocks),
        decode.push.transport,
        f"{decode.push.exposed_transfer_s * 1e3:.2f} ms",
        str(decode.num_prompt_tokens_computed),
        str(decode.num_cached_tokens),
    ]


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
