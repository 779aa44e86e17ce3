"""Images of a load: PNG files and their number per conversation, all drawn by a seed.

A file takes microseconds to make, because images of one size share their compressed pixels and
differ by their colors only. Servers still decode and encode each file anew. Needs no image library.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from baton.api.errors import ConfigError
from loadtest.load.generate import Lengths
from loadtest.load.lengths import LengthDistribution, UniformLengths, parse_lengths

SIZE_NOTATION = "WIDTHxHEIGHT[,WIDTHxHEIGHT...]"
MAX_IMAGES, MAX_SIDE = 64, 16384
_TILE = 8  # pixels with an equal color lie in squares of this side
_RECENT = 100  # a repeated image is one of the latest ones, as caches keep those


@dataclass(frozen=True, slots=True)
class DrawnImage:
    """An image whose colors are drawn with a text as seed: equal texts give equal files."""

    seed: str
    width: int
    height: int

    def make(self) -> bytes:
        """Return the image as a PNG file."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 3, 0, 0, 0)
        colors = random.Random(self.seed).randbytes(3 * 256)
        parts = (b"IHDR", header), (b"PLTE", colors), (b"IDAT", _pixels(self.width, self.height))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in (*parts, (b"IEND", b"")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoad:
    """The images of a plan.

    Attributes:
        counts: number of images of a request with images.
        sizes: widths and heights in pixels, all equally likely.
        share: share of conversations with images.
        repeats: share of images that are an earlier image of the load.
    """

    counts: LengthDistribution
    sizes: tuple[tuple[int, int], ...]
    share: float
    repeats: float

    def draw(self, seed: str) -> Iterator[tuple[DrawnImage, ...]]:
        """Yield the images of each conversation, without end; empty for a text conversation."""
        chance = random.Random(f"{seed} images")
        recent: deque[DrawnImage] = deque(maxlen=_RECENT)
        num_made = 0
        while True:
            found: list[DrawnImage] = []
            is_drawn = chance.random() < self.share
            for _ in range(self.counts.draw(chance) if is_drawn else 0):
                if recent and chance.random() < self.repeats:
                    found.append(chance.choice(recent))
                    continue
                width, height = chance.choice(self.sizes)
                found.append(DrawnImage(f"{seed} image {num_made}", width, height))
                recent.append(found[-1])
                num_made += 1
            yield tuple(found)


def parse_image_counts(text: str) -> LengthDistribution:
    """Parse a number of images, ``N`` or ``uniform:LEAST-MOST``; raises ConfigError."""
    counts = parse_lengths("images", text)
    most = counts.most if isinstance(counts, UniformLengths) else MAX_IMAGES + 1
    if isinstance(counts, Lengths) and counts.sigma == 0:
        most = int(counts.mean)
    if most > MAX_IMAGES:
        raise ConfigError(
            f"images: must be N or uniform:LEAST-MOST with 1 to {MAX_IMAGES} images, "
            f"got {text!r:.100}"
        )
    return counts


def parse_image_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse sizes in SIZE_NOTATION; raises ConfigError."""
    sizes = []
    for size in text.split(","):
        sides = size.split("x")
        are_numbers = len(sides) == 2 and all(
            side.isdecimal() and len(side) <= 5 and 1 <= int(side) <= MAX_SIDE for side in sides
        )
        if not are_numbers:
            raise ConfigError(
                f"image_size: must be {SIZE_NOTATION} with 1 to {MAX_SIDE} pixels a side, "
                f"got {text!r:.100}"
            )
        sizes.append((int(sides[0]), int(sides[1])))
    return tuple(sizes)


@lru_cache(maxsize=32)
def _pixels(width: int, height: int) -> bytes:
    """Return compressed rows of random color numbers, each after the row's filter type 0."""
    chance = random.Random(f"{width}x{height}")
    rows = bytearray()
    for top in range(0, height, _TILE):
        tiles = chance.randbytes(-(-width // _TILE))
        row = bytes(color for color in tiles for _ in range(_TILE))[:width]
        rows += (b"\0" + row) * min(_TILE, height - top)
    return zlib.compress(bytes(rows), 1)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
