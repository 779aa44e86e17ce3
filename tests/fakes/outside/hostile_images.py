"""Image files that a hostile or careless client may send, each with a part of its error.

A case without an error is odd but fine. Files are made by Pillow, or by hand where Pillow refuses.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

NOT_READ = "must be a whole PNG, JPEG, WEBP or GIF file"
ANIMATED = "is animated"
PIXELS = "pixels, got"
ASPECT = "times as long as wide"
# Pillow itself refuses some of these, or its process ends; the error is one line in every case.
ANY = "image"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A file; ``error`` is a part of the error, or empty if the file is accepted."""

    name: str
    data: bytes
    error: str


def picture(kind: str = "PNG", size: tuple[int, int] = (30, 20), mode: str = "RGB") -> bytes:
    """Return a file with random-looking pixels."""
    pixels = random.Random(f"{kind}{size}{mode}").randbytes(size[0] * size[1] * len(mode))
    buffer = io.BytesIO()
    Image.frombytes(mode, size, pixels).save(buffer, kind)
    return buffer.getvalue()


def animation(kind: str, num_frames: int = 3) -> bytes:
    """Return a file of several frames."""
    frames = [Image.new("RGB", (8, 8), (40 * i, 0, 0)) for i in range(num_frames)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def turned(orientation: int, size: tuple[int, int] = (30, 20)) -> bytes:
    """Return a JPEG with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(width: int, height: int, *chunks: bytes, data: bytes = b"") -> bytes:
    """Return a PNG that claims a size, whatever its data have."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", data or zlib.compress(b"\0" * 64))
    return _SIGNATURE + head + b"".join(chunks) + body + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    """Return a GIF that claims a size of its canvas."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"


def jpeg(width: int, height: int) -> bytes:
    """Return a JPEG whose frame header claims a size."""
    data = bytearray(picture("JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def webp(width: int, height: int) -> bytes:
    """Return a WebP whose extended header claims a canvas."""
    head = (
        struct.pack("<I", 0)
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    inner = picture("WEBP")[12:]
    body = b"WEBPVP8X" + struct.pack("<I", len(head)) + head + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _sizes() -> Iterator[Case]:
    for width, height, error in (
        (1, 1, ""), (1, 200, ""), (1, 201, ASPECT), (100_000, 1, ASPECT), (1, 100_000, ASPECT),
        (100_000, 100_000, PIXELS), (2**31 - 1, 2**31 - 1, ANY), (2**31 - 1, 1, ANY),
        (5_793, 5_793, PIXELS), (5_792, 5_792, ""), (0, 5, ANY), (5, 0, ANY),
    ):  # fmt: skip
        yield Case(f"png of {width} x {height}", png(width, height), error)
    for make in (jpeg, gif):
        for width, height, error in (
            (65_535, 65_535, PIXELS), (65_535, 1, ASPECT), (1, 65_535, ASPECT), (0, 0, ANY),
        ):  # fmt: skip
            told = error if make is jpeg else ANY  # a GIF without a frame has no size
            yield Case(f"{make.__name__} of {width} x {height}", make(width, height), told)
    for width, height in ((16_384, 16_384), (16_383, 16_383), (16_777_216, 16_777_216)):
        yield Case(f"webp of {width} x {height}", webp(width, height), ANY)


def _bombs() -> Iterator[Case]:
    zeros = zlib.compress(b"\0" * 2**26, 9)  # 64 MiB in 64 KiB
    text = chunk(b"zTXt", b"Comment\0\0" + zeros)
    profile = chunk(b"iCCP", b"bomb\0\0" + zeros)
    international = chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zeros)
    yield Case("png with a text bomb", png(30, 20, text), ANY)
    yield Case("png with a profile bomb", png(30, 20, profile), ANY)
    yield Case("png with a metadata bomb", png(30, 20, international), ANY)
    yield Case("png with eight text bombs", png(30, 20, *[text] * 8), ANY)
    yield Case("png with a pixel bomb", png(30, 20, data=zeros), "")
    yield Case("png with 20,000 chunks", png(30, 20, *[chunk(b"tEXt", b"a\0b")] * 20_000), "")
    yield Case("png with a chunk of 2 GiB", _SIGNATURE + b"\x7f\xff\xff\xff" + b"IHDR", NOT_READ)
    yield Case("jpeg with 10,000 comments", _with_comments(10_000), "")
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + b"\xff\xff" + b"\x01\x12\0\4\xff\xff\xff\xff\0\0\0\0" * 99
    yield Case("jpeg with an endless directory", _with_segment(0xE1, exif), "")
    loop = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x87\x69\0\4\0\0\0\1\0\0\0\x08\0\0\0\x08"
    yield Case("jpeg with a directory in itself", _with_segment(0xE1, loop), "")


def _with_segment(kind: int, content: bytes) -> bytes:
    data = picture("JPEG")
    return data[:2] + bytes([0xFF, kind]) + struct.pack(">H", len(content) + 2) + content + data[2:]


def _with_comments(number: int) -> bytes:
    data = picture("JPEG")
    return data[:2] + b"\xff\xfe\0\6abcd" * number + data[2:]


def _wrong_types() -> Iterator[Case]:
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    for name, data in {
        "svg": svg,
        "svg with a prolog": b"<?xml version='1.0'?>" + svg,
        "xml of a billion laughs": b"<!DOCTYPE l [<!ENTITY a 'x'>]><l>&a;</l>",
        "pdf": b"%PDF-1.7\n1 0 obj<<>>endobj",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%id) (r) file",
        "html": b"<html><script>alert(1)</script>",
        "shell": b"#!/bin/sh\nid\n",
        "zip": b"PK\3\4" + b"\0" * 60,
        "gzip": b"\x1f\x8b\x08" + b"\0" * 40,
        "elf": b"\x7fELF\2\1\1" + b"\0" * 60,
        "mp4": b"\0\0\0\x18ftypmp42" + b"\0" * 60,
        "heic": b"\0\0\0\x18ftypheic" + b"\0" * 60,
        "avif": b"\0\0\0\x18ftypavif" + b"\0" * 60,
        "wav": b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40,
        "mp3": b"ID3\3" + b"\0" * 60,
        "photoshop": b"8BPS\0\1" + b"\0" * 60,
        "icon": b"\0\0\1\0\1\0" + b"\0" * 60,
        "sun raster": b"\x59\xa6\x6a\x95" + b"\0" * 60,
        "fli": b"\0\0\0\0\x11\xaf" + b"\0" * 200,
        "text": b"hello", "blank": b" ", "zeros": b"\0" * 10_000, "newlines": b"\n" * 1_000,
        "magick script": b"push graphic-context\nimage over 0,0 0,0 'https://127.0.0.1/'",
    }.items():  # fmt: skip
        yield Case(name, data, NOT_READ)
    for kind in ("BMP", "TIFF", "PPM", "TGA", "ICO", "PCX", "DDS", "SGI", "JPEG2000"):
        try:
            yield Case(f"a whole {kind} file", picture(kind), NOT_READ)
        except (KeyError, OSError):  # this Pillow was built without it
            continue


def _animations() -> Iterator[Case]:
    yield Case("animated gif", animation("GIF"), ANIMATED)
    yield Case("gif of 300 frames", animation("GIF", 300), ANIMATED)
    yield Case("animated webp", animation("WEBP"), ANIMATED)
    yield Case("animated png", animation("PNG"), ANIMATED)


def _confusing() -> Iterator[Case]:
    """Yield files that two parsers may read differently; the file's beginning decides."""
    a, b = picture("PNG"), picture("JPEG", (9, 7))
    yield Case("png with a jpeg behind", a + b, "")
    yield Case("jpeg with a png behind", b + a, "")
    yield Case("png with a web page behind", a + b"<html>", "")
    yield Case("gif and script", b"GIF89a/*" + b"*/=1;alert(1)", ANY)
    yield Case("jpeg with a web page before", b"<html>" + b, NOT_READ)
    yield Case(
        "png with two headers",
        png(30, 20, chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0))),
        "",
    )
    yield Case("jpeg in a riff", b"RIFF" + struct.pack("<I", len(b)) + b"WEBP" + b, NOT_READ)
    for orientation in range(10):
        yield Case(f"jpeg of orientation {orientation}", turned(orientation), "")
    for mode, kind in (("L", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG"), ("L", "JPEG")):
        yield Case(f"{kind} of mode {mode}", picture(kind, mode=mode), "")


def _truncated() -> Iterator[Case]:
    """Yield beginnings of files; where pixels are missing, the node that decodes them finds out."""
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = picture(kind)
        for length in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 30):
            yield Case(f"{length} bytes of a {kind}", data[:length], "?")
        yield Case(f"half of a {kind}", data[: len(data) // 2], "?")
        yield Case(f"all but a byte of a {kind}", data[:-1], "?")


def _damaged() -> Iterator[Case]:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data, draws = picture(kind), random.Random(kind)
        for number in range(15):
            damaged = bytearray(data)
            for _ in range(1 + number):
                damaged[draws.randrange(min(len(data), 60))] = draws.randrange(256)
            yield Case(f"{kind} with {1 + number} bytes changed", bytes(damaged), "?")


def _pieces(kind: str) -> list[int]:
    """Return where the pieces of a whole file begin: chunks, segments or blocks, and their ends."""
    data = picture(kind)
    places = []
    if kind == "PNG":
        at = len(_SIGNATURE)
        while at < len(data):
            places += [at, at + 4, at + 8]  # length, kind, content
            at += 12 + struct.unpack(">I", data[at : at + 4])[0]
            places.append(at - 4)  # the checksum
    elif kind == "JPEG":
        at = 2
        while data[at + 1] != 0xDA:  # the pixels begin
            places += [at, at + 2, at + 4]
            at += 2 + struct.unpack(">H", data[at + 2 : at + 4])[0]
        places += [at, at + 2, at + 4, len(data) - 2]
    elif kind == "WEBP":
        places += [4, 8, 12, 16, 20, 23, 26, 30]
    else:
        places += [6, 8, 10, 13, data.index(b",", 13), data.index(b",", 13) + 10]
    return [place for place in places if place < len(data)]


def _cut_at_pieces() -> Iterator[Case]:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = picture(kind)
        for number, place in enumerate(_pieces(kind)):
            yield Case(f"{kind} cut before piece {number}", data[:place], "?")
            hole = data[:place] + data[place + 8 :]
            yield Case(f"{kind} without 8 bytes at piece {number}", hole, "?")


def _claims_of_animations() -> Iterator[Case]:
    """Yield files whose headers and frames do not agree about being animated."""
    for number in (0, 1, 2, 1_000_000, 2**32 - 1):
        control, counts = chunk(b"acTL", struct.pack(">II", number, 0)), 0 < number < 2**31
        error = ANIMATED if counts else ""
        yield Case(f"png that claims {number} frames", png(30, 20, control), error)
    late = png(30, 20)[: -len(chunk(b"IEND", b""))] + chunk(b"acTL", struct.pack(">II", 9, 0))
    yield Case("png that claims frames after its pixels", late + chunk(b"IEND", b""), "?")
    frame = struct.pack(">IIIIIHHBB", 0, 2**31 - 1, 2**31 - 1, 0, 0, 1, 1, 0, 0)
    huge = png(30, 20, chunk(b"acTL", struct.pack(">II", 1, 0)), chunk(b"fcTL", frame))
    yield Case("animated png with a huge frame", huge, NOT_READ)
    whole = animation("WEBP")
    yield Case("animated webp, half", whole[: len(whole) // 2], NOT_READ)
    yield Case("animated webp without its frames", whole[: whole.index(b"ANMF")], NOT_READ)
    still = webp(30, 20)
    yield Case("webp with a flag of animations", still[:20] + b"\x02" + still[21:], "?")
    moving = animation("GIF", 2)
    yield Case("animated gif, half", moving[: len(moving) // 2], "?")
    endless = moving[:-1] + b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0;"
    yield Case("gif that repeats for ever", endless, ANIMATED)


def _gif_bombs() -> Iterator[Case]:
    """Yield small GIFs whose pixels or blocks would fill a memory."""
    head, place = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + b"\0" * 6, b",\0\0\0\0"
    codes = b"\x02" + (b"\xff" + b"\x55" * 255) * 2_000 + b"\0"
    # A frame that is larger than the canvas makes the picture larger. The router reads no codes.
    sizes = (((8, 8), ""), ((65_535, 65_535), PIXELS), ((65_535, 1), ASPECT), ((0, 0), ""))
    for (width, height), error in sizes:
        frame = place + struct.pack("<HHB", width, height, 0) + codes
        yield Case(f"gif with a frame of {width} x {height}", head + frame + b";", error)
    yield Case("gif with a code of 255 bits", head + place + b"\x08\0\x08\0\0\xff\1\0\0;", "")
    yield Case("gif with 100,000 comments", head + b"!\xfe\1a\0" * 100_000 + b";", NOT_READ)
    yield Case("gif without an end of blocks", head + b"!\xfe" + b"\xff" * 50_000, NOT_READ)
    outside = b",\xff\xff\xff\xff" + struct.pack("<HHB", 8, 8, 0) + codes
    yield Case("gif with a frame outside its canvas", head + outside + b";", PIXELS)


def tiff(width: int, height: int, *, big: bool = False) -> bytes:
    """Return a TIFF, or a TIFF with 64-bit offsets, that claims a size."""
    entries = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1)]
    if big:
        rows = b"".join(struct.pack("<HHQQ", tag, kind, 1, value) for tag, kind, value in entries)
        return b"II\x2b\0\x08\0\0\0" + struct.pack("<QQ", 16, len(entries)) + rows + b"\0" * 8
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + rows + b"\0" * 4


def _tiff_bombs() -> Iterator[Case]:
    for width, height in ((1, 1), (65_535, 65_535), (2**32 - 1, 2**32 - 1)):
        yield Case(f"tiff of {width} x {height}", tiff(width, height), NOT_READ)
        big = tiff(width, height, big=True)
        yield Case(f"tiff of {width} x {height} with long offsets", big, NOT_READ)
    loop = b"II*\0" + struct.pack("<IH", 8, 0) + struct.pack("<I", 8)
    yield Case("tiff whose directory follows itself", loop, NOT_READ)


def hostile_files() -> list[Case]:
    """Return all cases; an error of "?" means accepted or refused, but decided."""
    return [
        Case("nothing", b"", "at least 1 byte"),
        *_sizes(), *_bombs(), *_wrong_types(), *_animations(), *_confusing(), *_truncated(),
        *_damaged(), *_cut_at_pieces(), *_claims_of_animations(), *_gif_bombs(), *_tiff_bombs(),
    ]  # fmt: skip
