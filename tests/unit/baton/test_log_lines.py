"""Log lines: what others said is in one of ours, and none of theirs looks like one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from baton.process import set_up_logging


@pytest.fixture
def kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("kept")
def test_a_message_is_one_line_whatever_a_node_put_into_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("info")
    logger = logging.getLogger("router.node_pool")
    logger.warning("d0 cannot reach %s", "p0\n12:00:00 INFO router: all is well\x1b[2J\rä")
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("a traceback has lines of its own")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(
        "WARNING router.node_pool: d0 cannot reach "
        "p0\\n12:00:00 INFO router: all is well\\x1b[2J\\rä"
    )
    assert lines[2] == "Traceback (most recent call last):"
