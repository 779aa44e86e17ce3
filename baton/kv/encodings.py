"""Encodings of images, laid out as units of a manifest, so that the KV connector can transfer them.

An encoding has one embedding per placeholder token of its image. A unit holds ``BLOCK_TOKENS``
embeddings; the last unit of an encoding may hold fewer.
"""

from __future__ import annotations

from baton.kv.manifest import KVArray, KVGroup, KVKind, KVManifest

BLOCK_TOKENS = 16
# A prefill node receives encodings under a second engine id: the engine id under which it sends KV,
# with this ending appended.
RECEIVER_ENDING = "/encodings"


def encodings_manifest(width: int, dtype: str) -> KVManifest:
    """Return the layout of units that hold encodings.

    Args:
        width: number of values in an embedding.
        dtype: name of the dtype of these values.
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
    """Return whether the units of a manifest hold encodings of images rather than KV."""
    return manifest.groups[0].kind is KVKind.ENCODING


def num_units(num_tokens: int) -> int:
    """Return the number of units that hold an encoding of ``num_tokens`` embeddings."""
    return -(-num_tokens // BLOCK_TOKENS)


def transfer_name(request_id: str, digest: bytes) -> str:
    """Return the id of the transfer that brings an image's encoding to a request.

    Args:
        digest: digest of the image.
    """
    return f"{request_id}#{digest.hex()}"


def request_of(transfer: str) -> str:
    """Return the id of the request for which a transfer brings an encoding or a prefix."""
    return transfer.rpartition("#")[0]
