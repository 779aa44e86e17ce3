"""Options of the router that no other test gives reach the parts that read them."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from baton.checkpoint.model_folder import read_limits
from router import base_parts, program
from router.api import http_server
from router.api.grpc.journal import JournalOptions
from router.config import RouterConfig
from router.intake.prompt_reader import EarlyReaders
from router.intake.text_options import TextOptions
from tests.fakes.checkpoints.demo_model import DEMO_MODEL


class SeenError(Exception):
    """Ends a start once a part was made."""


def config(**options: Any) -> RouterConfig:
    return RouterConfig(**{"model": str(DEMO_MODEL), "http_listen": "127.0.0.1:0", **options})


def test_prompts_are_read_and_logged_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(base_parts, "Intake", lambda *parts, **options: None)
    for part in ("PromptReader", "Answers"):
        monkeypatch.setattr(base_parts, part, lambda *parts, **options: made.update(options))
    texts = TextOptions(trust_request_chat_template=True, cut_changing_lines=False)
    base_parts.make_intake(
        config(texts=texts, log_prompts=True),
        DEMO_MODEL,
        read_limits(DEMO_MODEL),
        MagicMock(),
        MagicMock(),
        EarlyReaders(TextOptions().make_tokenizer(DEMO_MODEL)),
    )
    assert made["trusts_templates"]
    assert not made["cuts_changing_lines"]
    assert made["logs_prompts"]


async def seen_by_http(monkeypatch: pytest.MonkeyPatch, options: RouterConfig) -> dict[str, Any]:
    made: dict[str, Any] = {}

    def note(*parts: Any, **given: Any) -> None:
        made.update(given)
        raise SeenError

    monkeypatch.setattr(http_server, "HttpServer", note)
    names = MagicMock(bases=[MagicMock(model="demo")])
    parts = MagicMock(config=options, files=None, names=names)
    with pytest.raises(SeenError):
        async with program._serving_http(cast("program._Parts", parts)):
            pass
    return made


@pytest.mark.parametrize("origin", ["", "https://app.example"])
def test_pages_of_the_allowed_origin_may_call(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = asyncio.run(seen_by_http(monkeypatch, config(http_cors_origin=origin)))
    assert made["cors_origin"] == origin


def test_a_model_has_its_name_and_its_aliases() -> None:
    base = MagicMock(model="demo")
    options = config(served_model_name="demo", served_model_aliases="small, tiny")
    assert list(base_parts.make_names(options, [base]).names) == ["demo", "small", "tiny"]


def test_unread_requests_are_kept_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[JournalOptions] = []

    def note(options: JournalOptions) -> None:
        found.append(options)
        raise SeenError

    monkeypatch.setattr(program, "Journal", note)
    parts = MagicMock(config=config(resume_grace_s=3.0))
    with pytest.raises(SeenError):
        program._make_servers(cast("program._Parts", parts))
    assert found[0].grace_s == 3.0
