"""`baton generate` and `baton chat`: talk to a model through a running router."""

from __future__ import annotations

import contextlib
import functools
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from baton.api.errors import BatonError
from baton.api.outputs import TextDelta
from baton.api.printable import on_terminal
from baton.api.sampling_params import SamplingParams
from baton.cli.router_access import ClientAccess
from baton.cli.structured_output_options import (
    ChoiceOption,
    GrammarOption,
    JsonObjectOption,
    JsonSchemaOption,
    RegexOption,
    make_structured_output,
)
from baton.processes.process import print_error

if TYPE_CHECKING:
    from baton.client.client import Client

MaxTokensOption = Annotated[int, typer.Option(help="Most output tokens.")]
TemperatureOption = Annotated[
    float, typer.Option(help="Randomness of sampling; 0: the most probable token.")
]
TopKOption = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0: off.")]
TopPOption = Annotated[
    float,
    typer.Option(help="Keep the most probable tokens that together have this probability; 1: off."),
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Drop tokens whose probability is less than this share of the highest; 0: off."
    ),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="Above 1: tokens that occurred before become less probable; 1: off.")
]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End the output before this text; may be repeated.")
]
SeedOption = Annotated[
    int | None, typer.Option(help="Seed of sampling; the same seed gives the same tokens.")
]
ServedNameOption = Annotated[
    str, typer.Option(help="What the router calls the model; its first name if not given.")
]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to complete.")],
    access: ClientAccess,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    stop: StopOption = None,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    choice: ChoiceOption = None,
    json_object: JsonObjectOption = False,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option(help="Number of outputs; several are printed at the end.")] = 1,
    session_id: Annotated[
        str,
        typer.Option(
            help="Name of a session: its requests begin alike and go where the beginning is cached."
        ),
    ] = "",
    priority: Annotated[int, typer.Option(help="Priority in queues; smaller goes first.")] = 0,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline, seconds.")] = None,
    served_name: ServedNameOption = "",
    receipt: Annotated[bool, typer.Option(help="Print the latency receipt at the end.")] = True,
) -> None:
    """Complete a text, and print the tokens as they come."""
    with _interruptible():
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=tuple(stop or ()),
            seed=seed,
            n=n,
            structured_output=make_structured_output(
                json_schema, regex, grammar, choice, json_object
            ),
        )
        with _open_client(access) as client:
            if n > 1:
                [completions] = client.generate_batch(
                    [prompt],
                    params,
                    timeout_s=timeout_s,
                    session_id=session_id,
                    priority=priority,
                    model=served_name,
                )
                for completion in completions:
                    _print_text(f"[{completion.choice_index}] {completion.text}\n")
                return
            _, last = _print_stream(
                client.stream(
                    prompt,
                    params,
                    timeout_s=timeout_s,
                    session_id=session_id,
                    priority=priority,
                    model=served_name,
                )
            )
    if receipt and last is not None and last.receipt is not None:
        from rich.console import Console

        from baton.api.printable import printable
        from baton.telemetry.receipt_table import receipt_line

        line = printable(receipt_line(last.receipt))
        Console(stderr=True, highlight=False).print(line, style="dim", markup=False)


def chat(
    access: ClientAccess,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.9,
    seed: SeedOption = None,
    system: Annotated[str, typer.Option(help="Text of the system message.")] = "",
    served_name: ServedNameOption = "",
) -> None:
    """Talk to the model; Ctrl-D ends it, Ctrl-C stops an answer."""
    with contextlib.suppress(ImportError):  # importing readline makes arrow keys work in `input`
        import readline  # noqa: F401
    messages = [{"role": "system", "content": system}] if system else []
    session_id = uuid.uuid4().hex  # one session: each turn repeats the conversation
    with _interruptible():
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        num_failed = 0
        if sys.stdin.isatty():
            typer.secho("Ctrl-D ends the chat, Ctrl-C stops an answer", dim=True, err=True)
        with _open_client(access) as client:
            while (text := _read_line()) is not None:
                if text:
                    ask = functools.partial(
                        client.stream,
                        sampling_params=params,
                        session_id=session_id,
                        model=served_name,
                    )
                    num_failed += not _answer(ask, messages, text)
    # Scripts need an exit code; at a terminal the user has seen the errors.
    if num_failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _open_client(access: ClientAccess) -> Client:
    """Return a client of the router; raises ConfigError if its address is no ``host:port``."""
    # Import here, so that `--help` is fast.
    from baton.access.exposure import split_address
    from baton.client.client import Client

    split_address("router", access.router)
    return Client(access.router, api_key=access.api_key, tls=access.tls)


def _print_text(text: str) -> None:
    """Print a model's text: unchanged to a pipe or file, with escaped controls on a terminal.

    A prompt can make a model write escape sequences that change a terminal's title, clear the
    screen, or write to the clipboard.
    """
    shown = on_terminal(text) if sys.stdout.isatty() else text
    typer.echo(shown, nl=False, color=True)  # color=True keeps escape sequences in a pipe


def _print_stream(deltas: Iterator[TextDelta]) -> tuple[str, TextDelta | None]:
    """Print a completion while its pieces arrive; return the whole text and the last piece."""
    pieces: list[str] = []
    last = None
    for delta in deltas:
        _print_text(delta.text)
        pieces.append(delta.text)
        last = delta
    typer.echo()
    return "".join(pieces), last


def _answer(
    ask: Callable[[list[dict[str, str]]], Iterator[TextDelta]],
    messages: list[dict[str, str]],
    text: str,
) -> bool:
    """Ask for the model's next answer in a chat and print it; return whether this succeeded.

    After a failure, the user's message is removed from the conversation, which can then continue.
    """
    question = {"role": "user", "content": text}
    try:
        answer, _ = _print_stream(ask([*messages, question]))
    except BatonError as error:
        print_error(error)
        return False
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    else:
        messages += [question, {"role": "assistant", "content": answer}]
    return True


def _read_line() -> str | None:
    """Return a line of the user's input, or None at the end of the input.

    A prompt is shown only on a terminal.
    """
    is_person = sys.stdin.isatty()
    try:
        return input("> " if is_person else "").strip()
    except EOFError:
        if is_person:
            typer.echo()
        return None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Exit with code 130 on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(130) from None
