"""Encodings of images as units of a manifest, so that the KV connector can move them.

An encoding has one embedding per placeholder token of its image. A unit holds ``BLOCK_TOKENS``
embeddings. The last unit of an encoding may be filled in part.
"""

from __future__ import annotations

from baton.kv.manifest import KVArray, KVGroup, KVKind, KVManifest

BLOCK_TOKENS = 16
# Ending of the engine id under which a prefill node receives encodings, beside its own engine id.
RECEIVER_ENDING = "/encodings"


def encodings_manifest(width: int, dtype: str) -> KVManifest:
    """Return the layout of units that hold encodings.

    Args:
        width: numbers per embedding.
        dtype: name of the numbers' type.
    """
    array = KVArray(shape=(BLOCK_TOKENS, width), dtype=dtype)
    group = KVGroup(
        kind=KVKind.ENCODING,
        layers=(0,),
        arrays=(array,),
        num_places=1,
        block_size=BLOCK_TOKENS,
    )
    return KVManifest(groups=(group,))


def holds_encodings(manifest: KVManifest) -> bool:
    """Return whether a node's units hold encodings of images."""
    return manifest.groups[0].kind is KVKind.ENCODING


def num_units(num_tokens: int) -> int:
    """Return the number of units of an encoding with this many embeddings."""
    return -(-num_tokens // BLOCK_TOKENS)


def transfer_name(request_id: str, digest: bytes) -> str:
    """Return the id of the transfer of one image's encoding for a request."""
    return f"{request_id}#{digest.hex()}"


def request_of(transfer: str) -> str:
    """Return the id of the request for which a transfer brings an encoding."""
    return transfer.rpartition("#")[0]
