"""The simulated model: its tokens are a function of the prompt and the position, and of no more.

    token[i] = mix(hash(prompt), i) mod vocab_size

So whoever has the prompt can check an output, whichever nodes made it and however often it was
tried. It never draws an end-of-sequence token on purpose: outputs end at `max_tokens`, at a stop
token, or where the model's length ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

TokenAt = Callable[[int], int]  # the output token at a position, from 0 on

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: steps that fall evenly (Knuth, vol. 3, 6.4)


class OutputSource(Protocol):
    """Says which tokens a simulated model puts out: each follows from prompt and position alone.

    Attributes:
        eos_token_ids: end an output unless its request ignores them.
    """

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def output_of(self, prompt_token_ids: Sequence[int]) -> TokenAt:
        """Return the output behind a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class HashedOutputs:
    """Outputs that are hashes of the prompt and the position; none ends by itself."""

    vocab_size: int

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()

    def output_of(self, prompt_token_ids: Sequence[int]) -> TokenAt:
        key, vocab_size = prompt_key(prompt_token_ids), self.vocab_size
        return lambda index: token_at(key, index, vocab_size)


def prompt_key(prompt_token_ids: Sequence[int]) -> int:
    """What of a prompt the tokens depend on: 64 bits."""
    return xxhash.xxh3_64_intdigest(array("I", prompt_token_ids).tobytes())


def token_at(key: int, index: int, vocab_size: int) -> int:
    """The output token at a position, from 0 on, behind the prompt with this key."""
    mixed = (key + (index + 1) * _GOLDEN) & _MASK
    return (mixed ^ (mixed >> 29)) % vocab_size


def output_tokens(
    prompt_token_ids: Sequence[int], num_tokens: int, *, vocab_size: int
) -> tuple[int, ...]:
    """The first so many output tokens of a prompt: what a client must get."""
    key = prompt_key(prompt_token_ids)
    return tuple(token_at(key, index, vocab_size) for index in range(num_tokens))
