"""What the protocol is told and what it asks for: plain values, in both directions.

    a wish of the node, a decoded message, what came of an action  ->  take(it, now) ->  actions
    time                                                           ->  tick(now)     ->  actions

Whoever carries actions out (`kvconnector/io.py`) does so in order, and tells what came of one
before it does the next. That a message cannot be sent is thus an input like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvconnector.base import BlockPush, KVReservation, TransferEvent, TransferKey
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.messages import Message
from kvconnector.protocol.transfer import Piece

# ------------------------------------------------------------------ in: what the node wants


@dataclass(frozen=True, slots=True)
class Meet:
    """Learn a peer, or greet a known one anew."""

    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class Leave:
    """Forget a peer that its router has lost."""

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
    """Write these blocks as soon as they are granted; asked for at ``at_s``."""

    push: BlockPush
    at_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Write no more of a transfer."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Ask a prefill node to write no more of a transfer."""

    key: TransferKey
    engine_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take in what a process that is dead had sent."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class NotRead:
    """What has come could not be read before the next tick."""


# ------------------------------------------------------------------ in: what came of actions


@dataclass(frozen=True, slots=True)
class ConnectEnded:
    """A peer can be written to, by this path; or it cannot be reached, or must not be."""

    action: Connect
    path: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SendEnded:
    """A message is on its way, if that was to be told; or it did not go."""

    action: Send
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Posted:
    """A write was posted, in that time; if it is not done yet, its `WriteEnded` follows.

    Attributes:
        problem: why not, or why it was in vain; nothing follows then.
    """

    action: Write
    posting_s: float = 0.0
    is_done: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The oldest of a transfer's writes in flight (or of a probe's) is complete, or has failed.

    Attributes:
        key: of the transfer; `NO_TRANSFER`: it was a probe's.
    """

    engine_id: str
    key: TransferKey
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ProbePosted:
    """So many of a probe's writes are in flight; the ends of all follow."""

    action: WriteProbe
    num_writes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SlotRead:
    """What a peer has written into its slot."""

    action: ReadSlot
    digest: bytes


@dataclass(frozen=True, slots=True)
class Forbidden:
    """From now on nothing of a transfer can land here, though it was allowed."""

    action: Forbid


# ------------------------------------------------------------------ out


@dataclass(frozen=True, slots=True)
class Connect:
    """Learn a peer.

    Attributes:
        then: what failed over the old connection, which is to be forgotten first.
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
        tells: whether it is to be told that it went; that it did not always is.
    """

    engine_id: str
    message: Message
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Write blocks to a peer, into its blocks ``remote_block_ids``.

    Attributes:
        groups: of each block, its KV group; empty: nobody has to know.
    """

    engine_id: str
    key: TransferKey
    piece: Piece
    remote_block_ids: Sequence[int]
    groups: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """Come back with this when all before it is done: what is next depends on it and on time."""


@dataclass(frozen=True, slots=True)
class WriteProbe:
    """Write our pattern to a peer's slot: at least once, and again for so long or so often."""

    engine_id: str
    slot: int
    max_writes: int = 1
    max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LendSlot:
    """Clear a slot of our scratch memory for a peer."""

    slot: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """Look at what a peer has written; `SlotRead` follows."""

    slot: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class Allow:
    """Let a peer write these blocks."""

    engine_id: str
    key: TransferKey
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Forbid:
    """Let it write no more; with ``tells``, `Forbidden` follows if nothing can land then."""

    engine_id: str
    key: TransferKey
    tells: bool = False


Wish = Meet | Leave | Begin | Push | Abort | KVReservation | Drop | Drain
Result = ConnectEnded | SendEnded | Posted | WriteEnded | ProbePosted | SlotRead | Forbidden | Pause
Input = Wish | Message | Result | NotRead

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
    """What the parts of one state machine share: the present moment, and what they ask for."""

    now: float = 0.0
    actions: list[Action] = field(default_factory=list)

    def ask(self, action: Action) -> None:
        """Have something done, behind what was asked for before."""
        self.actions.append(action)

    def take(self) -> list[Action]:
        """What was asked for since the last call."""
        actions, self.actions = self.actions, []
        return actions


class StateMachine(Protocol):
    """One end of the hand-off, or a filter around it; called by one thread at a time."""

    def take(self, item: Input, now: float) -> list[Action]:
        """Take what has come; returns what is to be done before anything else."""

    def tick(self, now: float) -> list[Action]:
        """Go on as far as what has come, and the time, allow; once per round."""
