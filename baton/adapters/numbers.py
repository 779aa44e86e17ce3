"""Look for NaN and infinity in a tensor's bytes, without a numeric library.

A number is NaN or infinite if all bits of its exponent are set:

    BF16, F32    s eeeeeeee m...      F16    s eeeee m...

The two upper bytes of a number hold its exponent. Each byte is mapped to 1 if its exponent bits are
set; all numbers are then compared in two long integers, in the time of a few copies.
"""

from __future__ import annotations

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def _table(bits: int) -> bytes:
    """Return a table for `bytes.translate`: 1 for bytes in which all these bits are set."""
    return bytes(int(byte & bits == bits) for byte in range(256))


# The exponent bits in the highest byte of a number and in the byte below; 0: none.
_EXPONENTS = {"F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0)}


def is_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Return whether all numbers of little-endian ``data`` are finite.

    Args:
        data: whole numbers.
        dtype: a key of `DTYPE_BYTES`.
    """
    size = DTYPE_BYTES[dtype]
    high_bits, low_bits = _EXPONENTS[dtype]
    data = bytes(data)  # only bytes have `translate`
    high = data[size - 1 :: size].translate(_table(high_bits))
    if not low_bits:
        return not high.count(1)
    low = data[size - 2 :: size].translate(_table(low_bits))
    return not int.from_bytes(high, "little") & int.from_bytes(low, "little")
