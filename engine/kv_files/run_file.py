"""A file with a run of KV blocks: consecutive blocks of one chain, with a digest for each block.

    name     FIRST-LAST-START-BLOCKS-TOKENS.kv      hashes of the first and the last block, place
    content  magic, length | header | digest of the header | padding | block | block | ...

The header has the identity of the node's KV, a salt, and the hash and digest of each block. The
digests' key is derived from the folder's secret and the salt, which is new in each file. A block's
hash covers tokens, adapter, images and tenant, and the identity covers weights, dtypes and layout.
So neither a block of another file nor a block of another place in the file has the right digest.
Refuses to know: file systems, memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from baton.kv.block_hash import BlockHash
from baton.kv.block_key import DIGEST_BYTES, KEY_BYTES, BlockKey

ENDING = ".kv"
LAST_BYTES = 16  # bytes of the last block's hash in a name
_MAGIC = b"BATONKV1"
_PREFIX = struct.Struct("<8sI")
_ALIGNMENT = 4096
_SALT_BYTES = 16
_MAX_HEADER_BYTES = 2**26
# Maximum bytes of a header besides hashes and digests; bytes that the encoding of a hash or digest
# adds; maximum bytes of a hash.
_OTHER_HEADER_BYTES, _FRAME_BYTES, _MAX_HASH_BYTES = 256, 2, 64
_MAX_NUMBER = 2**40  # limit of the numbers in a name
_HEADER_NUMBER = 2**64  # number of the header's digest; blocks are numbered from 0
_Hash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=_MAX_HASH_BYTES)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class UnusableError(Exception):
    """A file that cannot be used; ``cause`` is one of `MISS_CAUSES`."""

    def __init__(self, cause: str, problem: str) -> None:
        super().__init__(problem)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class RunName:
    """The facts in a file's name.

    Attributes:
        first: hash of the first block.
        last: leading bytes of the last block's hash.
        start: number of blocks before the first one, in its chain.
        num_tokens: tokens that need not be computed if the run exists: the tokens of its blocks,
            or, if the blocks are a window or a state at the chain's end, of the whole chain.
    """

    first: BlockHash
    last: bytes
    start: int
    num_blocks: int
    num_tokens: int

    @classmethod
    def of(
        cls, hashes: Sequence[BlockHash], start: int, block_size: int, *, whole: bool = False
    ) -> RunName:
        """Return the name of a run with these blocks.

        Args:
            whole: whether the run is as valuable as the whole chain up to its end.
        """
        num_tokens = (len(hashes) + (start if whole else 0)) * block_size
        return cls(hashes[0], hashes[-1][:LAST_BYTES], start, len(hashes), num_tokens)

    @classmethod
    def parse(cls, text: str) -> RunName | None:
        """Return the facts in a file's name, or None for a file that is no run."""
        parts = text.removesuffix(ENDING).split("-")
        if not text.endswith(ENDING) or len(parts) != 5:
            return None
        try:
            first, last = bytes.fromhex(parts[0]), bytes.fromhex(parts[1])
            start, num_blocks, num_tokens = (int(part) for part in parts[2:])
        except ValueError:
            return None
        if not first or start < 0 or num_blocks < 1 or num_tokens < num_blocks:
            return None
        if max(start, num_tokens) >= _MAX_NUMBER:  # names are not trusted
            return None
        return cls(first, last, start, num_blocks, num_tokens)

    def __str__(self) -> str:
        numbers = f"{self.start}-{self.num_blocks}-{self.num_tokens}"
        return f"{self.first.hex()}-{self.last.hex()}-{numbers}{ENDING}"


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a file.

    Attributes:
        identity: digest of all that the blocks' bytes depend on, besides their hashes.
        salt: random bytes, different in each file.
        digests: keyed digest of each block.
    """

    identity: Annotated[str, msgspec.Meta(max_length=128)]
    salt: Annotated[bytes, msgspec.Meta(min_length=_SALT_BYTES, max_length=_SALT_BYTES)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    start: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    hashes: Annotated[tuple[_Hash, ...], msgspec.Meta(min_length=1)]
    digests: tuple[_Digest, ...]


_DECODER = msgspec.msgpack.Decoder(Header)


def encode_header(
    secret: bytes,
    identity: str,
    start: int,
    hashes: Sequence[BlockHash],
    blocks: Sequence[memoryview],
) -> bytes:
    """Return all bytes before the first block of a new file.

    Args:
        secret: the folder's secret.
        start: number of blocks before the first one, in its chain.
        hashes: hashes of the blocks.
        blocks: contents of the blocks, all of the same size.
    """
    salt = os.urandom(_SALT_BYTES)
    key = _key(secret, identity, salt)
    digests = tuple(
        key.digest(number, block_hash, block)
        for number, (block_hash, block) in enumerate(zip(hashes, blocks, strict=True))
    )
    header = Header(identity, salt, blocks[0].nbytes, start, tuple(hashes), digests)
    content = msgspec.msgpack.encode(header)
    whole = _PREFIX.pack(_MAGIC, len(content)) + content
    whole += key.digest(_HEADER_NUMBER, b"", memoryview(whole))
    return whole + bytes(-len(whole) % _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class CheckedHeader:
    """The header of an open file, whose digest was right.

    Attributes:
        data_start: offset of the first block in the file.
    """

    header: Header
    data_start: int
    key: BlockKey

    def is_right(self, place: int, block: memoryview) -> bool:
        """Return whether these bytes are the file's block of this place."""
        found = self.key.digest(place, self.header.hashes[place], block)
        return found == self.header.digests[place]


def header_bytes(prefix: bytes, num_blocks: int) -> int:
    """Return how many bytes of a file are the header with its digest.

    Args:
        prefix: the first bytes of the file, `PREFIX_BYTES` of them if the file is long enough.
        num_blocks: maximum number of the file's blocks, which limits the header's length. To
            decode a long header, before its digest is checked, would hold the GIL for long.

    Raises UnusableError for a file that does not begin like a run.
    """
    if len(prefix) < _PREFIX.size:
        raise UnusableError("short", "the file is cut off")
    magic, length = _PREFIX.unpack_from(prefix)
    per_block = 2 * _FRAME_BYTES + _MAX_HASH_BYTES + DIGEST_BYTES
    most = min(_OTHER_HEADER_BYTES + num_blocks * per_block, _MAX_HEADER_BYTES)
    if magic != _MAGIC or length > most:
        raise UnusableError("damaged", "the file does not begin like a run of blocks")
    return _PREFIX.size + int(length) + DIGEST_BYTES


PREFIX_BYTES = _PREFIX.size


def check_header(
    secret: bytes, identity: str, block_bytes: int, name: RunName, whole: bytes
) -> CheckedHeader:
    """Return the header in a file's first bytes, if all of it is right.

    Args:
        block_bytes: size of this node's blocks.
        name: the facts in the file's name.
        whole: the file's first bytes, as many as `header_bytes` returns; fewer if the file is
            shorter.

    Raises UnusableError for a file that is cut off or changed, or whose blocks differ from its
    name.
    """
    size = header_bytes(whole, name.num_blocks)
    if len(whole) < size:
        raise UnusableError("short", "the header is cut off")
    content, digest = whole[: size - DIGEST_BYTES], whole[size - DIGEST_BYTES : size]
    try:
        header = _DECODER.decode(content[_PREFIX.size :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableError("damaged", f"the header is malformed: {error}") from error
    if (header.identity, header.block_bytes) != (identity, block_bytes):
        raise UnusableError("foreign", "the blocks belong to other weights or another layout")
    key = _key(secret, identity, header.salt)
    if key.digest(_HEADER_NUMBER, b"", memoryview(content)) != digest:
        raise UnusableError("damaged", "the header's digest is wrong")
    found = header.hashes[0], header.hashes[-1][:LAST_BYTES], header.start, len(header.hashes)
    if found != (name.first, name.last, name.start, name.num_blocks):
        raise UnusableError("foreign", "the file has other blocks than its name says")
    if len(header.digests) != len(header.hashes):
        raise UnusableError("damaged", "the header lacks digests")
    return CheckedHeader(header, size + -size % _ALIGNMENT, key)


def _key(secret: bytes, identity: str, salt: bytes) -> BlockKey:
    """Derive the key of one file."""
    content = b"baton kv file 1" + salt + identity.encode()
    return BlockKey(hashlib.blake2b(content, digest_size=KEY_BYTES, key=secret).digest())
