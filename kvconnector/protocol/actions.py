"""Inputs and actions of the protocol's state machines, as plain values.

    a wish of the node, a decoded message, an action's result  ->  handle_input  ->  actions
    time                                                       ->  tick          ->  actions

The I/O loop (`kvconnector/io.py`) carries out actions in order, and passes each result to the
machine before the next action. A failed send is therefore an input, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvconnector.base import BlockPush, KVReservation, TransferEvent, TransferKey
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.messages import Message
from kvconnector.protocol.transfer import Piece

# ------------------------------------------------------------------ in: the node's wishes


@dataclass(frozen=True, slots=True)
class Meet:
    """Connect to a new peer, or greet a known peer again."""

    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class Leave:
    """Forget a peer that has left the router."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell a decode node that its prompt is being computed; see `Sender.start`."""

    key: TransferKey
    engine_id: str
    num_tokens: int
    num_blocks: int
    groups: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Push:
    """Write these blocks as soon as they are granted. ``at_s`` is the time of the wish."""

    push: BlockPush
    at_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Write no more blocks of a transfer."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Ask a prefill node to write no more blocks of a transfer."""

    key: TransferKey
    engine_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Read all bytes that a dead process sent."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """Input: the transport failed to read messages in this round; the next round tries again."""


# ------------------------------------------------------------------ in: results of actions


@dataclass(frozen=True, slots=True)
class ConnectEnded:
    """Input: a peer was connected over ``path``; with a ``problem``, the connection failed."""

    action: Connect
    path: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SendEnded:
    """Input: the result of a `Send` with ``wants_result``. With a ``problem``, nothing was sent."""

    action: Send
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Posted:
    """Input: a write was posted in ``posting_s``; its `WriteEnded` follows unless ``is_done``.

    Attributes:
        problem: why posting failed; if set, no `WriteEnded` follows.
    """

    action: Write
    posting_s: float = 0.0
    is_done: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """Input: the oldest write in flight of a transfer or probe has completed or failed.

    Attributes:
        key: the transfer; `NO_TRANSFER` for a probe.
    """

    engine_id: str
    key: TransferKey
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ProbePosted:
    """Input: ``num_writes`` writes of a probe are in flight; a `WriteEnded` follows for each."""

    action: WriteProbe
    num_writes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SlotRead:
    """Input: the digest of the bytes that a peer has written to its slot."""

    action: ReadSlot
    digest: bytes


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Input: writes of a transfer, allowed before, can no longer arrive here."""

    action: Forbid


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """Input: all actions before a `Pause` are carried out, and their results are handled."""


# ------------------------------------------------------------------ out


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to a peer.

    Attributes:
        then: a message to send over the new connection, after it failed over the old one, which is
            closed first.
    """

    peer: PeerInfo
    then: Send | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    engine_id: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message.

    Attributes:
        wants_result: whether `SendEnded` also follows a success; it always follows a failure.
    """

    engine_id: str
    message: Message
    wants_result: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Write blocks to a peer's blocks ``remote_block_ids``.

    Attributes:
        groups: KV group of each block; empty if the transport does not need groups.
    """

    engine_id: str
    key: TransferKey
    piece: Piece
    remote_block_ids: Sequence[int]
    groups: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """Carry out all earlier actions, then give the machine a `PauseEnded`."""


@dataclass(frozen=True, slots=True)
class WriteProbe:
    """Write our pattern to a slot: once, then up to ``max_writes`` times within ``max_s``."""

    engine_id: str
    slot: int
    max_writes: int = 1
    max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LendSlot:
    """Clear a slot of this node's scratch memory for a peer."""

    slot: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """Digest the bytes that a peer has written to a slot; `SlotRead` follows."""

    slot: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class Allow:
    """Allow a peer to write these blocks."""

    engine_id: str
    key: TransferKey
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Forbid:
    """Forbid a peer's writes. With ``wants_result``, `Forbidden` follows once none can arrive."""

    engine_id: str
    key: TransferKey
    wants_result: bool = False


Wish = Meet | Leave | Begin | Push | Abort | KVReservation | Drop | Drain
Result = (
    ConnectEnded | SendEnded | Posted | WriteEnded | ProbePosted | SlotRead | Forbidden | PauseEnded
)
Input = Wish | Message | Result | ReadFailed

Action = (
    Connect
    | Disconnect
    | Send
    | Write
    | Pause
    | WriteProbe
    | LendSlot
    | ReadSlot
    | Allow
    | Forbid
    | TransferEvent
)


@dataclass(slots=True)
class Turn:
    """The current time and the pending actions, shared by all parts of one state machine."""

    now: float = 0.0
    actions: list[Action] = field(default_factory=list)

    def ask(self, action: Action) -> None:
        """Append an action."""
        self.actions.append(action)

    def pop_actions(self) -> list[Action]:
        """Return the actions since the last call."""
        actions, self.actions = self.actions, []
        return actions


class StateMachine(Protocol):
    """One end of the hand-off, or a filter around an end; one thread at a time may call it."""

    def handle_input(self, item: Input, now: float) -> list[Action]:
        """Handle an input; return the actions to carry out before the next input."""

    def tick(self, now: float) -> list[Action]:
        """Handle the passing of time; return actions. The loop calls this once per round."""
