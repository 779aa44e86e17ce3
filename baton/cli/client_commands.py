"""Commands that talk to a running router: generate, chat, nodes, requests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import grpc
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.cli.receipt_table import receipt_line
from baton.cli.structured_output_options import (
    ChoiceOption,
    GrammarOption,
    JsonObjectOption,
    JsonSchemaOption,
    RegexOption,
    make_structured_output,
)
from baton.client import DEFAULT_ADDRESS, Client
from baton.errors import BatonError
from baton.outputs import TextDelta
from baton.process import print_error
from baton.rates import format_rate
from baton.rpc import open_sync_channel
from baton.sampling_params import SamplingParams
from baton.v1 import admin_pb2, admin_pb2_grpc, types_pb2

RouterOption = Annotated[str, typer.Option(help="host:port of the router.")]
MaxTokensOption = Annotated[int, typer.Option(help="Most output tokens.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0: off.")]
TopPOption = Annotated[float, typer.Option(help="Keep this much probability.")]
MinPOption = Annotated[
    float, typer.Option(help="Drop tokens less than this times as probable as the best; 0: off.")
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="Above 1: say less often what was said before; 1: off.")
]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given several times.")
]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to complete.")],
    router: RouterOption = DEFAULT_ADDRESS,
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
    n: Annotated[int, typer.Option(help="Outputs; more than one are printed at the end.")] = 1,
    session_id: Annotated[
        str, typer.Option(help="Requests of one session share a beginning: where it is cached.")
    ] = "",
    priority: Annotated[int, typer.Option(help="Where requests wait, smaller goes first.")] = 0,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline, seconds.")] = None,
    receipt: Annotated[bool, typer.Option(help="Print the latency receipt at the end.")] = True,
) -> None:
    """Complete a text; prints it as it is made."""
    with _errors():
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
        with Client(router) as client:
            if n > 1:
                [completions] = client.generate_batch(
                    [prompt],
                    params,
                    timeout_s=timeout_s,
                    session_id=session_id,
                    priority=priority,
                )
                for completion in completions:
                    typer.echo(f"[{completion.choice_index}] {completion.text}")
                return
            _, last = _print_stream(
                client.stream(
                    prompt, params, timeout_s=timeout_s, session_id=session_id, priority=priority
                )
            )
    if receipt and last is not None and last.receipt is not None:
        Console(stderr=True, highlight=False).print(receipt_line(last.receipt), style="dim")


def chat(
    router: RouterOption = DEFAULT_ADDRESS,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.9,
    seed: SeedOption = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
) -> None:
    """Talk to the model; Ctrl-D ends it, Ctrl-C stops an answer."""
    with contextlib.suppress(ImportError):  # makes the arrow keys work in `input`
        import readline  # noqa: F401
    messages = [{"role": "system", "content": system}] if system else []
    session_id = uuid.uuid4().hex  # every turn begins with all before it
    with _errors():
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        with Client(router) as client:
            while (text := _read_line()) is not None:
                if text:
                    _answer(client, messages, text, params, session_id)


def _describe_path(peer: admin_pb2.PeerDescription) -> str:
    """``nixl/ucx cma 2.9 GB/s``."""
    if not peer.transport:
        return "not paired" if peer.problem else "..."
    rate = peer.bandwidth_bytes_per_s
    return f"{peer.transport} {format_rate(rate)}" if rate else peer.transport


def nodes(router: RouterOption = DEFAULT_ADDRESS) -> None:
    """List the nodes that have joined a router, and whom they reach."""
    with _errors(), open_sync_channel(router) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            response = stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=5)
        except grpc.RpcError as error:
            _unreachable("router", router, error)
    columns = ("node", "role", "requests", "running", "parked", "free blocks")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("peers", overflow="fold")
    table.add_column("address", no_wrap=True)
    for node in response.nodes:
        table.add_row(
            escape(f"{node.node_name} (lost)" if node.lost else node.node_name),
            types_pb2.NodeRole.Name(node.role).removeprefix("NODE_ROLE_").lower(),
            str(node.num_requests),
            str(node.beat.num_running),
            str(node.beat.num_waiting_for_remote_kvs),
            str(node.beat.num_free_blocks),
            "\n".join(escape(f"{peer.node_name}: {_describe_path(peer)}") for peer in node.peers),
            node.address,
        )
    console = Console()
    console.print(table)
    # Whole sentences do not fit a column; each pair is told once.
    for problem in sorted({peer.problem for node in response.nodes for peer in node.peers}):
        if problem:
            console.print(f"not paired: {escape(problem)}", style="yellow")


def requests(
    address: Annotated[str, typer.Argument(help="host:port of a node (see `baton nodes`).")],
) -> None:
    """List the open requests of one node."""
    with _errors(), open_sync_channel(address) as channel:
        stub = admin_pb2_grpc.NodeAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            response = stub.ListRequests(admin_pb2.ListRequestsRequest(), timeout=5)
        except grpc.RpcError as error:
            _unreachable("node", address, error)
    columns = ("request", "status", "transfer", "tokens", "computed", "blocks", "age")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for request in response.requests:
        table.add_row(
            escape(request.request_id),
            request.status,
            request.transfer_state,
            str(request.num_tokens),
            str(request.num_computed_tokens),
            str(request.num_blocks),
            f"{request.age_s:.1f} s",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{response.num_free_blocks} of {response.num_blocks} blocks free, "
        f"{response.num_quarantined_blocks} in quarantine"
    )


def _print_stream(deltas: Iterator[TextDelta]) -> tuple[str, TextDelta | None]:
    """Print a completion as it comes; returns its text and the last delta."""
    pieces: list[str] = []
    last = None
    for delta in deltas:
        typer.echo(delta.text, nl=False)
        pieces.append(delta.text)
        last = delta
    typer.echo()
    return "".join(pieces), last


def _answer(
    client: Client,
    messages: list[dict[str, str]],
    text: str,
    params: SamplingParams,
    session_id: str,
) -> None:
    """One turn of a chat; a question that failed is forgotten, the conversation goes on."""
    question = {"role": "user", "content": text}
    try:
        answer, _ = _print_stream(
            client.stream([*messages, question], params, session_id=session_id)
        )
    except BatonError as error:
        print_error(error)
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    else:
        messages += [question, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """A line of the user's; None at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return None


@contextmanager
def _errors() -> Iterator[None]:
    """One line and exit code 1 for our errors; 130 for Ctrl-C."""
    try:
        yield
    except BatonError as error:
        print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(130) from None


def _unreachable(what: str, address: str, error: grpc.RpcError) -> NoReturn:
    print_error(f"{what}: {address} cannot be reached ({error.code().name})")
    raise typer.Exit(1)
