"""The demo that `make demo` runs: three processes, a real model, a receipt for each answer.

It downloads SmolLM2-135M-Instruct (93 MB) unless this was done before, and starts a router, a
prefill node and a decode node on this machine. Then it chats, asks for JSON and for a function
call, shows what the hand-off of each answer cost, and stops all processes. Without a network it
uses the toy model in examples/demo_model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from baton import BatonError, Client, Receipt, SamplingParams, StructuredOutput
from baton.api.errors import ModelLoadError
from baton.api.printable import on_terminal
from baton.checkpoint.packaged_model import SMOLLM2, PackagedModel, fetch_packaged_model
from baton.cli.programs.run_up import wait_ready
from baton.client.client import Prompt
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.kernel_library.state import BUILDING
from baton.processes.free_address import free_address
from baton.telemetry.receipt_table import format_bytes

ROOT = Path(__file__).parents[1]
TOY = ROOT / "examples" / "demo_model"
READY_TIMEOUT_S = 120.0
LONG_PROMPT_CHARACTERS = 6000
INDENT = 7

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

# Without this message, the model may repeat itself without end, depending on how the CPU rounds.
SHORT = {"role": "system", "content": "Answer in one short sentence."}
# City -> result of the function `get_weather`.
WEATHER = {"Oslo": "4 degrees, light rain"}


def main() -> int:
    """Run the demo; return the exit code."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help=f"another model (default: {SMOLLM2.name})")
    parser.add_argument("--max-tokens", type=int, default=64, help="per answer (default: 64)")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    model = arguments.model or fetch_model(console, SMOLLM2)
    is_toy = model is None or Path(model) == TOY
    config = LocalDeploymentConfig(
        model=str(model or TOY),
        listen=free_address(),
        http_listen=free_address(),
        # --no-local-prefill: the router could otherwise let the idle d0 compute a prompt alone.
        router_args=["--served-model-name", "demo", "--no-local-prefill"],
        node_args=["--kv-cache-memory", "256M", "--long-prefill-token-threshold", "256"],
    )
    try:
        console.print(Rule("router, prefill node (p0) and decode node (d0)"))
        with (
            LocalDeployment(config, lambda: console.print(BUILDING)) as deployment,
            Client(config.listen) as client,
        ):
            wait_ready(deployment, console, READY_TIMEOUT_S)
            talk = Talk(console, client, config.http_listen, arguments.max_tokens, started)
            show_toy(talk) if is_toy else show_model(talk)
    except BatonError as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    console.print()
    console.print(receipt_table(talk.receipts))
    console.print(
        "left after prefill: from token 1 sampled on p0 until d0 has all of the KV\n"
        "no KV pushed: d0 had nearly all of the prompt and computed the rest itself\n"
        f"The first token came {talk.first_token_s:.0f} s after the start, "
        "loading the model included.",
        style="dim",
    )
    console.print("Every process has been stopped. Try [bold].venv/bin/baton --help[/].")
    return 0


def fetch_model(console: Console, model: PackagedModel) -> str | None:
    """Return the model's GGUF file, downloading it once; None if the download fails.

    If the download fails, print the reason; the demo then uses the toy model.
    """
    with console.status(model.fetching) as status:
        status.stop()
        try:
            return str(fetch_packaged_model(model, status.start))
        except ModelLoadError as error:
            problem = error
    console.print(f"[yellow]{escape(str(problem))}: a toy model writes instead.[/]", soft_wrap=True)
    return None


@dataclass
class Talk:
    """Sends prompts, shows answers while they arrive, and collects receipts."""

    console: Console
    client: Client
    http: str
    max_tokens: int
    started: float
    receipts: list[tuple[str, Receipt]] = field(default_factory=list)
    first_token_s: float = 0.0

    def scene(self, title: str) -> None:
        """Print the title of the next part of the demo."""
        self.console.print()
        self.console.print(Rule(title, align="left"))

    def line(self, who: str, text: str, style: str = "dim") -> None:
        """Show a whole line, beside the speaker's name."""
        paragraph = Paragraph(self.console, who, style)
        paragraph.add(text)
        paragraph.end()

    def ask(
        self,
        title: str,
        prompt: Prompt,
        fits: Mapping[str, Any] | None = None,
    ) -> str:
        """Stream and show an answer, which fits the JSON schema ``fits`` if given; return it."""
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0,
            structured_output=StructuredOutput(json_schema=fits) if fits else None,
        )
        paragraph = Paragraph(self.console, "model", "")
        text = ""
        for delta in self.client.stream(prompt, params):
            self.first_token_s = self.first_token_s or time.monotonic() - self.started
            text += delta.text
            paragraph.add(delta.text)
            if delta.receipt is not None:
                self.receipts.append((title, delta.receipt))
        paragraph.end()
        return text

    def ask_with_tool(
        self, title: str, messages: Sequence[Mapping[str, Any]], *, must_call: bool
    ) -> dict[str, Any]:
        """Send a chat with a callable function over HTTP; show and return the answer's message."""
        body = {
            "model": "demo",
            "messages": messages,
            "tools": [GET_WEATHER],
            "tool_choice": "required" if must_call else "none",
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "include_receipt": True,
        }
        request = urllib.request.Request(
            f"http://{self.http}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as response:
            answer = json.load(response)
        (receipt,) = answer["baton"]["receipts"]
        self.receipts.append((title, msgspec.convert(receipt, Receipt)))
        message: dict[str, Any] = answer["choices"][0]["message"]
        if must_call:
            self.line("model", _as_written(message["tool_calls"][0]["function"]), "bold green")
        else:
            self.line("model", message["content"], "")
        return message


class Paragraph:
    """A text that is shown word by word, beside the speaker's name."""

    def __init__(self, console: Console, who: str, style: str) -> None:
        self._console = console
        self._style = style
        self._column = INDENT
        self._word = ""
        console.print(f"[cyan]{who:<{INDENT}}[/]", end="")

    def add(self, text: str) -> None:
        """Add a piece of text, and show all words that are now complete."""
        for character in text:
            if not character.isspace():
                self._word += character
                continue
            self._show_word()
            if character == "\n":
                self._break()
            elif self._column < self._console.width:
                self._write(character)

    def end(self) -> None:
        """Show the last word, and end the line."""
        self._show_word()
        self._console.print()

    def _show_word(self) -> None:
        if self._column + len(self._word) > self._console.width and self._column > INDENT:
            self._break()
        self._write(self._word)
        self._word = ""

    def _break(self) -> None:
        self._console.print()
        self._column = 0
        self._write(" " * INDENT)

    def _write(self, text: str) -> None:
        shown = on_terminal(text) if self._console.is_terminal else text
        self._console.print(shown, end="", style=self._style, markup=False, soft_wrap=True)
        self._column += len(text)


def show_model(talk: Talk) -> None:
    """Run the demo with a model that was trained to answer questions."""
    talk.scene("a chat: what is said before is computed once")
    talk.line("rule", SHORT["content"])
    chat: list[dict[str, Any]] = [SHORT]
    for turn, question in enumerate(
        ("What is the capital of France?", "What is it famous for? Answer in one sentence."), 1
    ):
        talk.line("you", question)
        chat.append({"role": "user", "content": question})
        answer = talk.ask(f"chat {turn}", chat)
        chat.append({"role": "assistant", "content": answer})

    talk.scene("an answer that fits a JSON schema")
    question = "Extract the person as JSON: Anna Schmidt is 34 years old and lives in Berlin."
    talk.line("you", question)
    talk.ask("JSON", [_user(question)], PERSON)

    talk.scene("a call of a function, get_weather(city)")
    question = "What is the weather in Oslo?"
    talk.line("you", question)
    rule = "Answer in one sentence, with what the function said."
    messages = [{"role": "system", "content": rule}, _user(question)]
    message = talk.ask_with_tool("call", messages, must_call=True)
    (call,) = message["tool_calls"]
    found = WEATHER.get(json.loads(call["function"]["arguments"])["city"], "unknown")
    talk.line("tool", found)
    result = {"role": "tool", "tool_call_id": call["id"], "content": found}
    talk.ask_with_tool("result", [*messages, message, result], must_call=False)

    talk.scene("a long prompt: its KV travels while it is computed")
    page = (ROOT / "LICENSE").read_text(encoding="utf-8")[-LONG_PROMPT_CHARACTERS:]
    question = "Which license is described above? Answer in one sentence."
    talk.line("you", f"(the last 6,000 characters of the file LICENSE) {question}")
    talk.ask("long", [_user(f"{page}\n\n{question}")])


def show_toy(talk: Talk) -> None:
    """Run the demo with the toy model, whose text looks like Python and means little."""
    source = Path(json.__file__).with_name("encoder.py").read_text(encoding="utf-8")
    long_prompt = source[:2600].rpartition("\n")[0] + "\n"
    question = "Write the function `read_lines(path)`: Return the lines of a file."
    scenes: Sequence[tuple[str, str, Prompt]] = (
        ("function", "def read_config(path):", "def read_config(path):\n"),
        ("long prompt", "(the first 2,600 characters of a module)", long_prompt),
        ("chat", question, [_user(question)]),
    )
    for title, shown, prompt in scenes:
        talk.scene(title)
        talk.line("you", shown)
        talk.ask(title, prompt)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _as_written(call: Mapping[str, str]) -> str:
    """Return the call ``{"name": "f", "arguments": '{"a": "b"}'}`` as ``f(a="b")``."""
    given = json.loads(call["arguments"])
    arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
    return f"{call['name']}({arguments})"


def receipt_table(receipts: Sequence[tuple[str, Receipt]]) -> Table:
    """Return a table of the receipts, with a column per answer: the work of p0 and of d0."""
    table = Table(title="receipts", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    columns = []
    for title, receipt in receipts:
        table.add_column(title, justify="right", no_wrap=True)
        columns.append(_receipt_cells(receipt))
    names = (
        "prompt tokens",
        "cached on p0",
        "computed on d0",
        "output tokens",
        "TTFT, ms",
        "time per token, ms",
        "KV pushed to d0",
        "left after prefill, ms",
    )
    for name, *cells in zip(names, *columns, strict=True):
        table.add_row(name, *cells)
    return table


def _receipt_cells(receipt: Receipt) -> list[str]:
    prefill, decode = receipt.prefill, receipt.decode
    pushed = decode is not None and decode.push.num_bytes > 0
    return [
        str(receipt.num_prompt_tokens),
        str(prefill.num_cached_tokens) if prefill else "-",
        str(decode.num_prompt_tokens_computed) if decode else "-",
        str(receipt.num_output_tokens),
        f"{receipt.ttft_s * 1e3:.0f}",
        f"{receipt.time_per_token_s * 1e3:.0f}",
        format_bytes(decode.push.num_bytes) if decode and pushed else "-",
        f"{decode.push.exposed_transfer_s * 1e3:.2f}" if decode and pushed else "-",
    ]


if __name__ == "__main__":
    sys.exit(main())
