"""Usage: what a request cost, as its client is told.

Who shares a cache with other tenants is told of prompt tokens that were cached only as far as it
sent them itself: the rest counts as computed. Numbers that would say the same in other words
(chunks, bytes that travelled) are left out. Knows no queue and no node.
"""

from __future__ import annotations

import dataclasses

from baton.api.outputs import Receipt
from router.calls.call import Call
from router.fleet.prefix.placement_memory import PlacementMemory
from router.fleet.prefix.prompt_hashes import HashKind
from router.intake.cache_salts import CacheSalts

MAX_BLOCKS = 2**18
LIFETIME_S = 3600.0
_KIND = HashKind(16, "blake2b")


class OwnPrompts:
    """What tenants of sharing groups sent themselves, by short hashes of its blocks.

    A router knows what went through it, and of that what is not too old: it tells less rather
    than too much.

    Args:
        salts: of this router.
        memory: where the hashes are kept.
    """

    def __init__(self, salts: CacheSalts, memory: PlacementMemory | None = None) -> None:
        self._salts = salts
        self._memory = memory or PlacementMemory(MAX_BLOCKS, LIFETIME_S)

    def num_tokens(self, call: Call) -> int | None:
        """How much of a prompt its tenant sent before; None: it shares its cache with nobody."""
        if not call.terms.principal.cache_group:
            return None
        self._memory.expire()
        num_blocks = 0
        for block_hash in self._hashes(call):
            if not self._memory.get(block_hash, 0):
                break
            num_blocks += 1
        return num_blocks * _KIND.block_size

    def note(self, call: Call) -> None:
        """A prompt's first token came, so all of it was computed, or found.

        Not before: who could have a prompt counted as its own that was not computed would learn
        from its next request whether another one sent it.
        """
        if call.terms.principal.cache_group:
            self._memory.note(1, self._hashes(call))

    def _hashes(self, call: Call) -> tuple[int, ...]:
        salt = self._salts.of_tenant(call.terms.principal, call.terms.cache_word)
        return call.hashes.salted(salt).of(_KIND)


def told(receipt: Receipt, num_own_tokens: int | None) -> Receipt:
    """A receipt for who sent so much of the prompt before; None: for who shares no cache."""
    if num_own_tokens is None:
        return receipt
    prefill, decode = receipt.prefill, receipt.decode
    if prefill is not None:
        num_hidden = max(prefill.num_cached_tokens - num_own_tokens, 0)
        prefill = dataclasses.replace(
            prefill,
            num_cached_tokens=prefill.num_cached_tokens - num_hidden,
            num_computed_tokens=prefill.num_computed_tokens + num_hidden,
            num_chunks=0,
        )
    if decode is not None:
        num_hidden = max(decode.num_cached_tokens - num_own_tokens, 0)
        is_alone = prefill is None  # it computed what it had not cached
        decode = dataclasses.replace(
            decode,
            num_cached_tokens=decode.num_cached_tokens - num_hidden,
            num_prompt_tokens_computed=decode.num_prompt_tokens_computed + num_hidden * is_alone,
            push=dataclasses.replace(decode.push, num_bytes=0, num_blocks=0, num_descriptors=0),
        )
    return dataclasses.replace(receipt, prefill=prefill, decode=decode)
