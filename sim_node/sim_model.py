"""The simulated model: its tokens depend only on the prompt and the position.

    token[i] = mix(hash(prompt), i) mod vocab_size

So whoever has the prompt can check an output, whatever nodes and retries made it. There is no
end-of-sequence token: outputs end at `max_tokens`, at a stop token, or at the model's maximum
length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

TokenAt = Callable[[int], int]  # returns the output token at a position, counted from 0

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads positions evenly (Knuth, vol. 3, 6.4)


class OutputSource(Protocol):
    """Where the tokens of a simulated model come from; they depend only on prompt and position.

    Attributes:
        eos_token_ids: tokens that end an output unless the request ignores them.
    """

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def output_of(self, prompt_token_ids: Sequence[int]) -> TokenAt:
        """Return a function that gives the output token at each position after a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class HashedOutputs:
    """Outputs whose tokens are hashes of prompt and position; they never end by themselves."""

    vocab_size: int

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()

    def output_of(self, prompt_token_ids: Sequence[int]) -> TokenAt:
        key, vocab_size = prompt_key(prompt_token_ids), self.vocab_size
        return lambda index: token_at(key, index, vocab_size)


def prompt_key(prompt_token_ids: Sequence[int]) -> int:
    """Return a 64-bit hash of a prompt, from which the prompt's output follows."""
    return xxhash.xxh3_64_intdigest(array("I", prompt_token_ids).tobytes())


def token_at(key: int, index: int, vocab_size: int) -> int:
    """Return output token ``index`` (from 0) for the prompt whose `prompt_key` is ``key``."""
    mixed = (key + (index + 1) * _GOLDEN) & _MASK
    return (mixed ^ (mixed >> 29)) % vocab_size


def output_tokens(
    prompt_token_ids: Sequence[int], num_tokens: int, *, vocab_size: int
) -> tuple[int, ...]:
    """Return the first output tokens of a prompt, with which to check what clients received."""
    key = prompt_key(prompt_token_ids)
    return tuple(token_at(key, index, vocab_size) for index in range(num_tokens))
