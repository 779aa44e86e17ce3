"""Unit tests of log lines: texts of others cannot look like a log line of Baton."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import re
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog

from baton.api.errors import ConfigError
from baton.telemetry.logs import MAX_WAITING, change_log_level, close_logging, set_up_logging

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
EVIL = "p0\n2026-01-01T12:00:00.000Z INFO router: all is well\x1b[2J\rä\u2028"
SHOWN = "p0\\n2026-01-01T12:00:00.000Z INFO router: all is well\\x1b[2J\\rä\\u2028"
NAMES = (
    "", "baton", "router", "prefill_node", "decode_node", "node_runtime", "sim_node", "loadtest",
    "engine", "kvconnector", "models", "baton_kernels",
)  # fmt: skip


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in NAMES}
    root.handlers = []
    yield
    close_logging()
    root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    close_logging()
    return capsys.readouterr().err.splitlines()


def fail() -> None:
    raise ValueError(f"no\n{EVIL}")


def test_a_line_has_date_level_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    logging.getLogger("router.fleet.node_pool").warning("d0 cannot reach %s", EVIL)
    [line] = lines(capsys)
    assert re.fullmatch(
        f"{TIME} WARNING router.fleet.node_pool: d0 cannot reach {re.escape(SHOWN)}", line
    )


def test_a_module_may_have_a_level_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("warning", modules=["kvconnector.protocol=debug", "router=error"])
    for name in ("kvconnector.protocol.sender", "kvconnector.io", "router.fleet", "engine"):
        for level in (logging.DEBUG, logging.WARNING):
            logging.getLogger(name).log(level, "heard")
    assert change_log_level("debug", "engine.core") == "warning"
    assert change_log_level("error") == "warning"  # of all others
    logging.getLogger("engine.core.scheduler").debug("heard")
    logging.getLogger("engine.offline").warning("not heard")
    logging.getLogger("kvconnector.protocol").debug("heard")
    assert [line.split()[2].rstrip(":") for line in lines(capsys)] == [
        "kvconnector.protocol.sender", "kvconnector.protocol.sender", "kvconnector.io", "engine",
        "engine.core.scheduler", "kvconnector.protocol",
    ]  # fmt: skip
    for name in ("kvconnector.protocol", "engine.core", "router"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.parametrize("module", ["grpc=debug", "router=loud", "router", "=debug"])
def test_a_module_that_is_none_of_ours_or_a_level_that_is_none_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="log_module: "):
        set_up_logging("info", modules=[module])
    with pytest.raises(ConfigError, match="module: must be one of baton"):
        change_log_level("debug", "grpc")


def test_a_traceback_is_below_its_line_and_looks_like_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("info")
    try:
        fail()
    except ValueError:
        logging.getLogger("router").exception("it failed")
    first, second, *others = lines(capsys)
    assert first.endswith(" ERROR router: it failed")
    assert second == "  Traceback (most recent call last):"
    assert others
    assert all(line.startswith("  ") and line.isprintable() for line in others)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_whose_request_a_line_is_of_is_in_it(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", log_format)
    logger = logging.getLogger("engine.engine")
    with structlog.contextvars.bound_contextvars(request_id="r1", trace_id="t1"):
        logger.info("of the context")
        logger.info("of the call", extra={"request_id": 'a b="c"\n', "num": 3, "none": None})
    logger.info("of nobody")
    shown = lines(capsys)
    if log_format == "text":
        assert [line.partition("engine.engine: ")[2] for line in shown] == [
            "of the context request_id=r1 trace_id=t1",
            'of the call request_id="a b=\\"c\\"\\n" trace_id=t1 num=3',
            "of nobody",
        ]
        return
    first, second, third = map(json.loads, shown)
    assert re.fullmatch(TIME, first.pop("time"))
    assert first == {
        "level": "info", "logger": "engine.engine", "message": "of the context",
        "request_id": "r1", "trace_id": "t1",
    }  # fmt: skip
    assert (second["request_id"], second["num"], second["trace_id"]) == ('a b="c"\n', 3, "t1")
    assert "none" not in second
    assert "request_id" not in third


def test_in_json_a_line_is_one_object_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("info", "json")
    try:
        fail()
    except ValueError:
        logging.getLogger("router").exception("of %s", EVIL)
    [line] = lines(capsys)
    assert line.isascii()
    event = json.loads(line)
    assert event["message"] == f"of {EVIL}"
    assert f"ValueError: no\n{EVIL}" in event["exception"]


def test_debug_is_ours_and_no_library_s(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug")
    for name in ("grpc._cython.cygrpc", "asyncio", "decode_node.node"):
        logging.getLogger(name).debug("spam or not")
    assert change_log_level("warning") == "debug"
    logging.getLogger("decode_node.node").info("not any more")
    logging.getLogger("grpc").warning("that is another matter")
    assert change_log_level("info") == "warning"
    assert [line.partition("Z ")[2] for line in lines(capsys)] == [
        "DEBUG decode_node.node: spam or not",
        "WARNING grpc: that is another matter",
    ]


@pytest.mark.parametrize(
    ("level", "log_format", "field"), [("loud", "text", "log_level"), ("info", "xml", "log_format")]
)
def test_what_is_unknown_is_an_error(level: str, log_format: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: must be one of .*, got '(loud|xml)'"):
        set_up_logging(level, log_format)


@pytest.mark.medium
def test_who_does_not_read_holds_up_nothing_and_is_told_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, writes = os.pipe()
    text = bytearray()
    with os.fdopen(reads, "rb") as reader:
        with os.fdopen(writes, "w", encoding="utf-8") as full:
            monkeypatch.setattr(sys, "stderr", full)
            set_up_logging("info")
            for number in range(MAX_WAITING + 2000):  # the pipe has room for about a thousand
                logging.getLogger("router").info("%d %s", number, "x" * 40)
            drain = threading.Thread(target=lambda: text.extend(reader.read()))
            drain.start()
            close_logging()
        drain.join()
    assert text.startswith(b"20")
    assert re.search(
        rb"WARNING baton.telemetry.logs: \d+ lines of this log are lost: whoever", text
    )
    assert text.count(b" INFO router: ") >= MAX_WAITING


def test_a_library_that_configures_logging_ends_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    """NIXL does so when it is imported, and that closes all handlers."""
    set_up_logging("info")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    logging.getLogger("decode_node.node").info("goes on")
    assert lines(capsys)[-1].endswith("INFO decode_node.node: goes on")
