"""Which interpreters the tests of this folder can be run with."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.conftest import reason_against_interpreter

IS_NEW_NUMPY = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4)


@pytest.mark.parametrize(
    ("triton", "clashes"), [("3.6.0", IS_NEW_NUMPY), ("3.7.1", False), ("3.10.0", False)]
)
def test_an_old_interpreter_is_not_run_with_a_new_numpy(triton: str, clashes: bool) -> None:
    reason = reason_against_interpreter(triton)
    assert (reason is not None) is clashes
    assert reason is None or f"Triton {triton} needs numpy<2.4" in reason
