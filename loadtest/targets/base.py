"""Target: the interface between a load test and a server. Knows no plan and no clock."""

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
    """A request got no complete answer.

    Args:
        kind: name under which errors are counted: the server's status, or the part that failed.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The server's own count of tokens read and written.

    Attributes:
        num_cached_tokens: prompt tokens that the server had cached; None: not reported.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A piece of an answer that arrived at once.

    Attributes:
        num_tokens: tokens of the text; None: the server does not say.
        num_chars: length of the text, used if ``num_tokens`` is None.
        finish_reason: the server's reason for the output's end; None or empty before it.
        usage: token counts of the whole request so far.
        receipt: Baton's receipt.
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
    """A connected server that requests can be sent to."""

    def describe(self) -> dict[str, str]:
        """Return the target's description of itself, for the report."""
        ...

    def prepare(self, prompt: Prompt, output_length: int) -> bytes:
        """Make a request message for exactly ``output_length`` tokens, sampled greedily.

        This is called in advance, so that sending takes no time.
        """
        ...

    def stream(self, payload: bytes) -> AsyncGenerator[Frame, None]:
        """Send a request, and yield frames as they arrive; closing the generator cancels it.

        Requests never wait here. Raises TargetError for an incomplete answer.
        """
        ...

    async def close(self) -> None: ...


OpenTarget = Callable[[TargetOptions], Awaitable[Target]]
