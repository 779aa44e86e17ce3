"""Usage: what a request cost, as far as its client may see it.

If a tenant shares its cache with other tenants, its receipts count only tokens of its own prompts
as cached, and all other tokens as computed. Figures that would reveal other tenants' tokens
(chunks, bytes sent, fetched prefixes) are left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.api.outputs import Receipt
from router.calls.call import Call
from router.fleet.prefix.placement_memory import PlacementMemory
from router.fleet.prefix.prompt_hashes import HashKind
from router.intake.cache_salts import CacheSalts

MAX_BLOCKS = 2**18
LIFETIME_S = 3600.0
_KIND = HashKind(16, "blake2b")
_NO_FETCH: dict[str, Any] = {"num_fetched_tokens": 0, "num_fetches_lost": 0, "fetch_wait_s": 0.0}


class OwnPrompts:
    """Remembers which prompts each tenant in a sharing group has sent itself.

    A prompt is remembered as hashes of its blocks, made with a salt of the tenant's own. Prompts
    that did not pass this router lately are missing, so counts may be too low, but never too high.

    Args:
        salts: the router's cache salts.
        memory: holds the hashes; None: a new memory.
    """

    def __init__(self, salts: CacheSalts, memory: PlacementMemory | None = None) -> None:
        self._salts = salts
        self._memory = memory or PlacementMemory(MAX_BLOCKS, LIFETIME_S)

    def num_tokens(self, call: Call) -> int | None:
        """Return how many tokens at a prompt's start the call's tenant has sent in earlier prompts.

        Returns None if the tenant shares no cache.
        """
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
        """Remember a call's prompt. Call this at the first token, when the prompt's KV exists.

        Remembering a prompt earlier would leak: if it is not computed after all, the receipt of the
        tenant's next request would reveal whether another tenant had sent this prompt.
        """
        if call.terms.principal.cache_group:
            self._memory.note(1, self._hashes(call))

    def _hashes(self, call: Call) -> tuple[int, ...]:
        salt = self._salts.of_tenant(call.terms.principal, call.terms.cache_word)
        return call.hashes.salted(salt).of(_KIND)


def told(receipt: Receipt, num_own_tokens: int | None) -> Receipt:
    """Return a receipt as its client may see it.

    Args:
        num_own_tokens: number of tokens at the prompt's start that the client's tenant sent before;
            None: the tenant shares no cache, so nothing is hidden.
    """
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
            **_NO_FETCH,
        )
    if decode is not None:
        num_hidden = max(decode.num_cached_tokens - num_own_tokens, 0)
        # Without a prefill node, the decode node computed the uncached tokens
        is_alone = prefill is None
        decode = dataclasses.replace(
            decode,
            num_cached_tokens=decode.num_cached_tokens - num_hidden,
            num_prompt_tokens_computed=decode.num_prompt_tokens_computed + num_hidden * is_alone,
            push=dataclasses.replace(decode.push, num_bytes=0, num_blocks=0, num_descriptors=0),
            **_NO_FETCH,
        )
    return dataclasses.replace(receipt, prefill=prefill, decode=decode)
