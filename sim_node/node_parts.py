"""NodeParts: what the prefill and the decode half of the simulator are given, and what both do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.api.errors import InvalidRequestError
from baton.api.prompt import check_prompt, check_sampling_params
from baton.block_hash import BlockHash, BlockHasher, extra_keys_of
from baton.link.words import (
    AbortAll,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    PrefillCommand,
    RequestError,
    failed_delta,
)
from sim_node.clock import NodeClock
from sim_node.kv_cache import SimKVCache
from sim_node.kv_network import KVMessage, KVNetwork
from sim_node.options import SimModel, SimOptions
from sim_node.sim_model import prompt_key, token_at
from sim_node.timing import TimingModel

Command = PrefillCommand | DecodeCommand | CancelCommand


@dataclass(slots=True)
class NodeParts:
    """The parts of one simulated node.

    Attributes:
        timing: may be replaced: a node may become slow.
        num_tokens_made: output tokens so far, for statistics.
    """

    engine_id: str
    model: SimModel
    options: SimOptions
    timing: TimingModel
    clock: NodeClock
    cache: SimKVCache
    hasher: BlockHasher
    network: KVNetwork
    emit: Callable[[NodeEvent], None]
    num_tokens_made: int = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.hasher.block_size)

    def name_blocks(
        self, hashes: list[BlockHash], token_ids: list[int], command: PrefillCommand | DecodeCommand
    ) -> list[BlockHash]:
        """Append the names of the full blocks of a command's sequence that ``hashes`` lacks."""
        self.hasher.extend(hashes, token_ids, extra_keys_of(command.cache_salt))
        return hashes

    def check(self, command: PrefillCommand | DecodeCommand) -> int:
        """The key of a command's prompt; raises InvalidRequestError.

        Tokens of earlier attempts must be those that this prompt has: else a retry lost some.
        """
        vocab_size = self.model.vocab_size
        check_prompt(
            [*command.prompt_token_ids, *command.output_token_ids],
            vocab_size=vocab_size,
            max_model_len=self.model.max_model_len,
        )
        check_sampling_params(command.sampling_params, vocab_size=vocab_size)
        key = prompt_key(command.prompt_token_ids)
        for index, token_id in enumerate(command.output_token_ids):
            if token_id != token_at(key, index, vocab_size):
                raise InvalidRequestError(
                    "output_token_ids", f"token {index} is not of this prompt, got {token_id}"
                )
        return key

    def fail(self, request_id: str, epoch: int, code: str, message: str) -> None:
        """Tell the router that a request ended here."""
        error = RequestError(code, message)
        self.emit((failed_delta(request_id, epoch, error),))


class SimEngine(Protocol):
    """What a node's shell needs of its half; all calls come from the event loop."""

    def take(self, command: Command) -> None:
        """A command of the router."""

    def take_message(self, message: KVMessage) -> None:
        """A message of a peer."""

    def lose_peer(self, engine_id: str) -> None:
        """A peer is gone."""

    def abort_all(self, abort: AbortAll) -> None:
        """A router is gone."""

    def expire(self) -> None:
        """End what is over its deadline; called now and then."""

    def beat(self) -> NodeBeat: ...
