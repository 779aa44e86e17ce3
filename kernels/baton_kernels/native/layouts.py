"""Checks, before the C library is used, that structs in Python equal the structs in C.

Fields are read by their position in memory. If a field were missing or misplaced in one language, C
would silently read wrong values. Refuses to know: compilers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton.kernel_library.compilers import BuildError

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_STRUCT = re.compile(r"typedef struct\s*\{([^{}]*)\}\s*(\w+);")
# A declaration in C: the type, then names, each with a star if it is a pointer.
_DECLARATION = re.compile(r"(?:const )?(\w+) ?((?:\W*\w+,?)+)$")
_POINTER, _WORD, _NUMBER = "pointer", "int64_t", "double"
_KINDS = {
    ctypes.c_int64: _WORD, ctypes.c_double: _NUMBER,
    ctypes.c_void_p: _POINTER, ctypes.c_char_p: _POINTER,
}  # fmt: skip


def check_layouts(sources: Sequence[Path], structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Raise BuildError, which names struct and field, unless all structs are equal in C.

    Args:
        sources: C files and headers.
        structs: the structs in Python, by their names in C.
    """
    bodies: dict[str, str] = {}
    for path in sources:
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        bodies |= {name: body for body, name in _STRUCT.findall(text)}
    for name, struct in structs.items():
        if name not in bodies:
            raise BuildError(f"{struct.__name__}: the C sources have no struct {name}")
        in_c, here = list(_in_c(name, bodies)), list(_here(struct))
        if in_c == here:
            continue
        place = next(
            (
                place
                for place, both in enumerate(zip(in_c, here, strict=False))
                if both[0] != both[1]
            ),
            min(len(in_c), len(here)),
        )
        found, expected = (" ".join(one[place][::-1]) if place < len(one) else "nothing"
                           for one in (in_c, here))  # fmt: skip
        raise BuildError(
            f"field {place} of {name} is {found} in C, and {expected} in {struct.__name__}"
        )


def _in_c(name: str, bodies: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for declaration in filter(None, (" ".join(one.split()) for one in bodies[name].split(";"))):
        if "(*" in declaration:  # a function pointer
            yield declaration[declaration.index("(*") + 2 : declaration.index(")")], _POINTER
            continue
        read = _DECLARATION.match(declaration)
        if read is None:
            raise BuildError(f"{name}: {declaration!r} is not understood")
        kind = read.group(1)
        for field in map(str.strip, read.group(2).split(",")):
            if field.startswith("*"):
                yield field.lstrip("* "), _POINTER
            elif kind in bodies:
                yield from _in_c(kind, bodies)
            else:
                yield field, kind


def _here(struct: type[ctypes.Structure]) -> Iterator[tuple[str, str]]:
    for name, ctype, *_ in struct._fields_:
        if issubclass(ctype, ctypes.Structure):
            yield from _here(ctype)
        else:
            yield name, _KINDS[ctype]
