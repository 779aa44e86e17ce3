"""Look for NaN and infinity in a tensor's bytes, without a numeric library.

A number is NaN or infinite if all bits of its exponent are set:

    BF16, F32    s eeeeeeee m...      F16    s eeeee m...

The two highest bytes of a number hold its exponent. Each such byte is mapped to 1 if all of its
exponent bits are set. The mapped bytes of all numbers form two long integers, whose bitwise "and"
is zero if all numbers are finite. The check takes as long as a few copies of the bytes.
"""

from __future__ import annotations

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def _table(bits: int) -> bytes:
    """Return a table for `bytes.translate`: bytes with all of ``bits`` set become 1, others 0."""
    return bytes(int(byte & bits == bits) for byte in range(256))


# The exponent bits in the highest byte of a number and in the byte below; 0: none.
_EXPONENTS = {"F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0)}


def is_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Return whether all numbers of little-endian ``data`` are finite.

    Args:
        data: the bytes of whole numbers.
        dtype: a key of `DTYPE_BYTES`.
    """
    size = DTYPE_BYTES[dtype]
    high_bits, low_bits = _EXPONENTS[dtype]
    data = bytes(data)  # `translate` is a method of bytes only
    high = data[size - 1 :: size].translate(_table(high_bits))
    if not low_bits:
        return not high.count(1)
    low = data[size - 2 :: size].translate(_table(low_bits))
    return not int.from_bytes(high, "little") & int.from_bytes(low, "little")
