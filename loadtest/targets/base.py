"""Target: the interface between a load test and a server. Refuses to know: plans, clocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from baton.access.tls_options import ONLY_ROUTERS, TlsOptions
from baton.api.errors import BatonError
from baton.api.outputs import Receipt
from baton.options import check_limits, group, option
from loadtest.load.prompts import Prompt

COUNT_TOKENS_BY = ("auto", "logprobs", "continuous-usage")


class TargetError(BatonError):
    """Raised for a request that got no complete answer.

    Args:
        kind: name under which the error is counted: the server's status, or the part of the
            exchange that failed.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The server's own counts of a request's tokens.

    Attributes:
        num_cached_tokens: prompt tokens that the server had cached; None: not reported.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A piece of an answer that arrived at one time.

    Attributes:
        num_tokens: number of the piece's tokens; None: the server does not report them.
        num_chars: length of the piece's text, used if ``num_tokens`` is None.
        finish_reason: the server's reason for the end of the output; None or empty before the end.
        usage: the server's token counts of the whole request so far; None: not reported here.
        receipt: Baton's receipt for the request; None: not in this frame.
    """

    num_tokens: int | None
    num_chars: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options for connecting to a server."""

    url: str = option(
        "",
        name="target",
        help="grpc://host:port (Baton) or http://host:port/v1 (OpenAI completions).",
    )
    api_key: str = option(
        "", is_secret=True, help="API key that the server wants; left out of reports."
    )
    model: str = option("", help="HTTP: name of the model; empty: the first that the server lists.")
    connections: int = option(
        1, least=1, most=1000, help="gRPC: number of connections that share the calls."
    )
    count_tokens_by: str = option(
        "auto",
        help="HTTP: request option that tells how many tokens a frame has: "
        f"{', '.join(COUNT_TOKENS_BY)}; auto: the last one if the server accepts it, else none.",
    )
    include_receipt: bool = option(
        False, help="HTTP: ask for Baton's receipts; other servers may refuse such requests."
    )
    tls: TlsOptions = group(TlsOptions, without=ONLY_ROUTERS)

    def __post_init__(self) -> None:
        check_limits(self)


class Target(Protocol):
    """A server that is connected, and to which requests can be sent."""

    def describe(self) -> dict[str, str]:
        """Return the target's description of itself, for the report."""
        ...

    def prepare(self, prompt: Prompt, output_length: int) -> bytes:
        """Make a request message for exactly ``output_length`` tokens, sampled greedily.

        The player calls this in advance, so that sending is not delayed.
        """
        ...

    def stream(self, payload: bytes) -> AsyncGenerator[Frame, None]:
        """Send a request and yield frames as they arrive; closing the generator cancels.

        Requests are sent at once, and never wait in the client. Raises TargetError for an
        incomplete answer.
        """
        ...

    async def close(self) -> None: ...


OpenTarget = Callable[[TargetOptions], Awaitable[Target]]
