"""The structs of the C sources are those of Python, field for field."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.kernel_library.build import find_sources
from baton.kernel_library.compilers import BuildError
from baton_kernels.native import library
from baton_kernels.native.layouts import check_layouts

STRUCTS = library._STRUCTS


def test_all_structs_that_functions_take_are_compared() -> None:
    arguments = [one for _, taken in library._SIGNATURES.values() for one in taken]
    structs = {getattr(argument, "_type_", None) for argument in arguments}
    assert {one for one in structs if hasattr(one, "_fields_")} <= set(STRUCTS.values())
    check_layouts(find_sources(), STRUCTS)


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "linear.h", "num_rows, num_columns, depth", "num_columns, num_rows, depth",
            "field 5 of linear_call is int64_t num_columns in C, and int64_t num_rows in Linear",
        ),
        (
            "rows.c", "double eps;\n    int64_t wide;", "int64_t wide;\n    double eps;",
            "field 9 of norm_call is int64_t wide in C, and double eps in NormCall",
        ),
        (
            "attention.h", "const float *sinks;", "",
            "field 24 of attention_call is pointer row_ends in C, and pointer sinks in "
            "AttentionCall",
        ),
        (
            "states.c", "*segment_start_loc, *read_slots", "*read_slots, *segment_start_loc",
            "of recurrence_call is pointer read_slots in C",
        ),
        (
            "ranks.c", "} collective_call;", "} collection;",
            "CollectiveCall: the C sources have no struct collective_call",
        ),
    ],
)  # fmt: skip
def test_a_struct_that_differs_is_refused(
    tmp_path: Path, file: str, old: str, new: str, problem: str
) -> None:
    for path in find_sources():
        shutil.copy(path, tmp_path)
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    structs = {name: STRUCTS[name] for name in sorted(STRUCTS, key="conv_call".__eq__)}
    with pytest.raises(BuildError, match=problem):
        check_layouts(sorted(tmp_path.iterdir()), structs)
