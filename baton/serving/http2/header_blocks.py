"""HeaderMeter: finds an upper limit of the decoded size of HTTP/2 header blocks without decoding.

In HPACK (RFC 7541), one byte can repeat a whole earlier header, so a block of 3 KB can decode to 12
MB. The meter only remembers the sizes of earlier headers.
"""

from __future__ import annotations

from collections import deque

# Bytes that a header counts in addition to its name and value (RFC 7541, section 4.1).
_ENTRY_BYTES = 32
_NUM_STATIC = 61
# Number of entries and maximum sizes in the static table: the longest name has 27 characters, the
# longest entry 28.
_STATIC_NAME_BYTES = 27
_STATIC_ENTRY_BYTES = _ENTRY_BYTES + 28
# Maximum number of entries of a dynamic table with 4,096 bytes, the size that gRPC offers.
_MAX_DYNAMIC = 4096 // _ENTRY_BYTES
# Maximum number of bytes of an integer, because no length or index in a block needs more.
_MAX_INTEGER_BYTES = 4


class HeaderBlockError(Exception):
    """A header block that is malformed, or decodes to too many bytes."""


class HeaderMeter:
    """Meter of the header blocks of one connection, which it must get in order of arrival.

    Sizes are upper limits: text in Huffman code counts as 1.6 times its bytes, and an entry of the
    dynamic table still counts when the decoder may have evicted it.
    """

    def __init__(self) -> None:
        # Length of the name, and size, of each entry of the dynamic table, newest entry first.
        self._dynamic: deque[tuple[int, int]] = deque(maxlen=_MAX_DYNAMIC)

    def measure(self, block: bytes, max_bytes: int) -> int:
        """Return an upper bound of a block's decoded bytes, plus 32 for each header.

        Raises:
            HeaderBlockError: the bound exceeds ``max_bytes``, or the block is malformed.
        """
        total = at = 0
        try:
            while at < len(block):
                size, at = self._field(block, at)
                total += size
                if total > max_bytes:
                    raise HeaderBlockError(f"headers of more than {max_bytes} bytes")
        except IndexError:
            raise HeaderBlockError("a header block that is malformed") from None
        return total

    def _field(self, block: bytes, at: int) -> tuple[int, int]:
        """Return the size of the header field that begins at ``at``, and the field's end."""
        first = block[at]
        if first & 0x80:
            index, at = _integer(block, at, 0x7F)
            return self._sizes_of(index)[1], at
        if first & 0xE0 == 0x20:  # a new size of the dynamic table
            _, at = _integer(block, at, 0x1F)
            return 1, at
        is_inserted = bool(first & 0x40)
        index, at = _integer(block, at, 0x3F if is_inserted else 0x0F)
        if index:
            # The entry's name is in a table: clients often send a known name with a new value.
            name_bytes, _ = self._sizes_of(index)
        else:
            name_bytes, at = _string(block, at)
        value_bytes, at = _string(block, at)
        size = _ENTRY_BYTES + name_bytes + value_bytes
        if is_inserted:
            self._dynamic.appendleft((name_bytes, size))
        return size, at

    def _sizes_of(self, index: int) -> tuple[int, int]:
        """Return the length of an entry's name, and the entry's size.

        Raises:
            IndexError: the tables have no such entry.
        """
        if 0 < index <= _NUM_STATIC:
            return _STATIC_NAME_BYTES, _STATIC_ENTRY_BYTES
        if not index:
            raise IndexError
        return self._dynamic[index - _NUM_STATIC - 1]


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Read an integer with this prefix mask; return the integer and the next position."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for number in range(_MAX_INTEGER_BYTES):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, at
    raise IndexError


def _string(block: bytes, at: int) -> tuple[int, int]:
    """Return an upper bound of a string's length, and the position after it."""
    is_huffman = block[at] & 0x80
    num_bytes, at = _integer(block, at, 0x7F)
    end = at + num_bytes
    if end > len(block):
        raise IndexError
    # The shortest Huffman code has five bits, so a byte holds at most 1.6 characters.
    return (num_bytes * 8 // 5 if is_huffman else num_bytes), end
