"""Nodes that a test drives by hand, without process or link: a test sends their events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from baton.api.outputs import (
    DecodeReceipt,
    FinishReason,
    PrefillReceipt,
    PushReceipt,
    Receipt,
    RequestDelta,
)
from baton.link import wire
from baton.link.words import (
    AdminCall,
    AdminReply,
    NodeRegistration,
    NodeRole,
    PeerReport,
    RequestError,
    RouterCommand,
)
from router.fleet.node import Node
from router.fleet.node_pool import NodePool

MODEL = "digest"
Command = TypeVar("Command")

PREFILL_RECEIPT = PrefillReceipt(
    queue_s=0.1, prefill_s=0.2, num_chunks=1, num_computed_tokens=3, num_cached_tokens=0
)
DECODE_RECEIPT = DecodeReceipt(
    parked_s=0.1,
    first_step_s=0.1,
    steps_until_first=1,
    num_prompt_tokens_computed=0,
    num_forwards=2,
    num_preemptions=0,
    push=PushReceipt(num_bytes=1, num_blocks=1, transport="t", exposed_transfer_s=0.1),
)


def make_receipt(**fields: Any) -> Receipt:
    """Make a receipt of 3 + 5 tokens by p0 and d0, with these fields instead."""
    usual: dict[str, Any] = {
        "num_prompt_tokens": 3,
        "num_output_tokens": 5,
        "ttft_s": 0.01,
        "total_s": 0.05,
        "prefill_node": "p0",
        "decode_node": "d0",
        "prefill": PREFILL_RECEIPT,
        "decode": DECODE_RECEIPT,
    }
    return Receipt(**usual | fields)


def make_pool(
    max_model_len: int = 1000,
    eligibility: Sequence[Callable[[Node], bool]] = (),
    *,
    may_self_prefill: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> NodePool:
    return NodePool(
        own_identity={"model": MODEL},
        max_model_len=max_model_len,
        eligibility=eligibility,
        may_self_prefill=may_self_prefill,
        clock=clock,
    )


def make_registration(
    name: str,
    role: NodeRole,
    *,
    incarnation: int = 0,
    max_model_len: int = 100,
    differs: Mapping[str, str] | None = None,
    loads_adapters: bool = False,
    encodes_images: bool = False,
) -> NodeRegistration:
    """Make a node's registration; ``differs``: entries of its compatibility that differ."""
    return NodeRegistration(
        node_name=name,
        engine_id=f"{name}-{incarnation}",
        role=role,
        version="1",
        address=f"{name}:1",
        peer_info=f"info of {name}-{incarnation}".encode(),
        compatibility={"model": MODEL, "dtype": "float32", "block_size": "16", **(differs or {})},
        max_model_len=max_model_len,
        num_blocks=max(10, max_model_len // 16),
        block_size=16,
        loads_adapters=loads_adapters,
        encodes_images=encodes_images,
    )


class HandNode:
    """A joined node that records its commands, and sends what a test tells it to send."""

    def __init__(self, pool: NodePool, registration: NodeRegistration) -> None:
        self.pool = pool
        self.commands: list[RouterCommand] = []
        self.is_hung_up = False
        self.node = Node(registration, self._obey, hang_up=self._hang_up)
        pool.add_node(self.node)

    def _obey(self, command: RouterCommand) -> None:
        self.commands.append(command)
        if isinstance(command, AdminCall):  # which operators would wait for
            problem = RequestError("UNIMPLEMENTED", "driven by hand")
            self.pool.on_event(self.node, AdminReply(command.call_id, error=problem))

    @property
    def engine_id(self) -> str:
        return self.node.engine_id

    def of(self, kind: type[Command]) -> list[Command]:
        """Return the commands of one kind, oldest first."""
        return [command for command in self.commands if isinstance(command, kind)]

    def reach(self, other: HandNode, *, connected: bool = True, problem: str = "") -> None:
        """Report whether this node reaches another."""
        self.pool.on_event(self.node, PeerReport(other.engine_id, connected, "t", problem))

    def say(self, *deltas: RequestDelta) -> None:
        """Send the deltas of one step to the router, as a link delivers them."""
        event = wire.node_event_from_proto(wire.node_event_to_proto(deltas))
        assert event is not None
        self.pool.on_event(self.node, event)

    def _hang_up(self) -> None:
        self.is_hung_up = True

    def leave(self) -> None:
        self.pool.remove(self.node)


def join_pair(
    pool: NodePool,
    number: int = 0,
    *,
    max_model_len: int = 100,
    encodes_images: bool = False,
) -> tuple[HandNode, HandNode]:
    """Join a prefill and a decode node that reach each other."""
    prefill, decode = (
        HandNode(
            pool,
            make_registration(
                f"{role.value[0]}{number}",
                role,
                max_model_len=max_model_len,
                encodes_images=encodes_images,
            ),
        )
        for role in (NodeRole.PREFILL, NodeRole.DECODE)
    )
    prefill.reach(decode)
    return prefill, decode


def token_1(
    request_id: str, token_id: int, *, epoch: int, finish: FinishReason | None = None
) -> RequestDelta:
    """Make the delta that a prefill node sends when it has sampled token 1."""
    return RequestDelta(request_id, 0, (token_id,), finish, epoch=epoch, prefill=PREFILL_RECEIPT)


def token(
    request_id: str, index: int, token_id: int, *, epoch: int, finish: FinishReason | None = None
) -> RequestDelta:
    """Make the delta that a decode node sends in a step; the last one carries the receipt."""
    return RequestDelta(
        request_id,
        index,
        (token_id,),
        finish,
        epoch=epoch,
        decode=DECODE_RECEIPT if finish else None,
    )


def failure(request_id: str, code: str, message: str, *, epoch: int) -> RequestDelta:
    return RequestDelta(request_id, 0, (), epoch=epoch, error=RequestError(code, message))
