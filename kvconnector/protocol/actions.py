"""The inputs and the actions of the protocol's state machines, as plain values.

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
    """Wish: connect to a new peer, or greet a known peer again."""

    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class Leave:
    """Wish: forget a peer that the router has lost."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Wish: tell a decode node that a prompt is being computed for it (`Sender.start`)."""

    key: TransferKey
    engine_id: str
    num_tokens: int
    num_blocks: int
    groups: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Push:
    """Wish: write these blocks as soon as they are granted. ``at_s``: time of the wish."""

    push: BlockPush
    at_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Wish of a prefill node: write no more blocks of a transfer."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Wish of a decode node: ask the prefill node to write no more blocks of a transfer."""

    key: TransferKey
    engine_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Wish of a decode node: read all bytes that a dead peer has sent."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """Input: the transport failed to read messages in this round; the next round tries again."""


# ------------------------------------------------------------------ in: results of actions


@dataclass(frozen=True, slots=True)
class ConnectEnded:
    """Input: a peer was connected over the data path ``path``, or connecting has failed."""

    action: Connect
    path: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SendEnded:
    """Input: a `Send` has succeeded or failed. If ``problem`` is not empty, nothing was sent.

    Attributes:
        is_queue_full: whether the problem is only that too many bytes wait for the peer.
    """

    action: Send
    problem: str = ""
    is_queue_full: bool = False


@dataclass(frozen=True, slots=True)
class Posted:
    """Input: a write was posted, or posting has failed. `WriteEnded` follows unless ``is_done``.

    Attributes:
        problem: why posting failed; if not empty, no `WriteEnded` follows.
        round_trip_s: shortest recent round trip of the path to the peer; 0: unknown.
    """

    action: Write
    posting_s: float = 0.0
    is_done: bool = False
    problem: str = ""
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """Input: the oldest write in flight of a transfer or probe has completed or failed.

    Attributes:
        key: the transfer that the write belongs to; `NO_TRANSFER`: a probe's write.
    """

    engine_id: str
    key: TransferKey
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ProbePosted:
    """Input: ``num_writes`` writes of a probe were posted; a `WriteEnded` follows for each."""

    action: WriteProbe
    num_writes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SlotRead:
    """Input: the result of `ReadSlot`: the digest of the bytes in the slot lent to a peer."""

    action: ReadSlot
    digest: bytes


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Input: the result of `Forbid`: writes of the transfer can no longer arrive here."""

    action: Forbid


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """Input: the result of `Pause`: all earlier actions and their results were handled."""


# ------------------------------------------------------------------ out


@dataclass(frozen=True, slots=True)
class Connect:
    """Action: connect to a peer.

    Attributes:
        then: a message to send over the new connection, because sending over the old connection
            failed. The old connection is closed first.
    """

    peer: PeerInfo
    then: Send | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    engine_id: str


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send a message.

    Attributes:
        wants_result: whether `SendEnded` follows also if the message was sent; after a failure, it
            always follows.
    """

    engine_id: str
    message: Message
    wants_result: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Action: write the blocks of ``piece`` to the peer's blocks ``remote_block_ids``.

    Attributes:
        groups: KV group of each block; empty: there is only one group.
    """

    engine_id: str
    key: TransferKey
    piece: Piece
    remote_block_ids: Sequence[int]
    groups: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """Action: pass a `PauseEnded` to the state machine after all earlier actions."""


@dataclass(frozen=True, slots=True)
class WriteProbe:
    """Action: write this node's pattern to the peer's slot.

    The pattern is written ``max_writes`` times, or less often if ``max_s`` seconds have passed.
    """

    engine_id: str
    slot: int
    max_writes: int = 1
    max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LendSlot:
    """Action: clear a slot of this node's scratch memory, to which a peer then writes."""

    slot: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """Action: compute the digest of the bytes in the slot lent to a peer; `SlotRead` follows."""

    slot: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class Allow:
    """Action: allow a peer to write these blocks of this node, for one transfer."""

    engine_id: str
    key: TransferKey
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Forbid:
    """Action: forbid a transfer's writes.

    With ``wants_result``, `Forbidden` follows if none of these writes can arrive any more.
    """

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
    """The current time and the pending actions, which all parts of one state machine share."""

    now: float = 0.0
    actions: list[Action] = field(default_factory=list)

    def add_action(self, action: Action) -> None:
        """Add an action to those that the I/O loop will carry out."""
        self.actions.append(action)

    def pop_actions(self) -> list[Action]:
        """Return and remove the actions that were added since the last call."""
        actions, self.actions = self.actions, []
        return actions


class StateMachine(Protocol):
    """One end of the hand-off, or a filter around an end. Only one thread may call it at a time."""

    def handle_input(self, item: Input, now: float) -> list[Action]:
        """Handle an input; return actions, which the I/O loop carries out before the next input."""

    def tick(self, now: float) -> list[Action]:
        """Handle the passing of time; return actions. The I/O loop calls this once per round."""
