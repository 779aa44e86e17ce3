"""Crash dump: complete, without users' tokens, and never the cause of another failure."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine import LLM, crash_dump
from engine.crash_dump import FOLDER_VARIABLE, dump_crash
from tests.fakes.checkpoints.demo_model import DEMO_MODEL


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32", num_blocks=64)


def test_a_dump_says_what_ran_and_who_held_which_blocks(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    request = llm._make_choices("import os\n" * 10, SamplingParams(max_tokens=4))[0]
    llm.engine.add_request(request)
    llm.engine.step()
    path = dump_crash(llm.engine, RuntimeError("the floor is lava"))
    assert path is not None
    dump = json.loads(path.read_text(encoding="utf-8"))
    assert dump["error"] == ["builtins.RuntimeError"]  # one that was never raised
    assert dump["scheduled"] == [
        {"request_id": request.request_id, "num_tokens": request.num_prompt_tokens}
    ]
    (described,) = dump["requests"]
    assert described["status"] == "RUNNING"
    assert dump["blocks"]["by_ref_count"] == {"1": len(described["block_ids"])}
    assert "token_ids" not in described
    assert dump["metrics"]["requests_running"] == 1
    assert dump["metrics"]["prompt_tokens_computed_total"] == request.num_prompt_tokens
    llm.engine.abort(request.request_id)


def test_a_dump_that_cannot_be_written_raises_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "folder"))
    assert dump_crash(llm.engine, RuntimeError("again")) is None
    monkeypatch.setattr(crash_dump, "MAX_BYTES", 10)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert dump_crash(llm.engine, RuntimeError("too long")) is None


def test_a_dump_raises_nothing_where_there_is_no_temporary_folder(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert dump_crash(llm.engine, RuntimeError("again")) is None
    assert "cannot write a crash dump" in caplog.text


def test_a_dump_of_an_engine_that_changes_meanwhile_raises_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> dict[str, object]:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(crash_dump, "describe", fail)
    assert dump_crash(llm.engine, RuntimeError("again")) is None


def raised(secret: str) -> RuntimeError:
    """Return an error as an engine raises it: with a cause, and messages that quote the input."""
    try:
        try:
            raise ValueError(f"bad prompt {secret}")
        except ValueError as cause:
            raise RuntimeError(f"cannot go on with {secret}") from cause
    except RuntimeError as error:
        return error


@pytest.mark.medium
def test_no_text_of_a_client_is_in_a_dump(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    params = SamplingParams(
        max_tokens=4,
        stop=("SECRET-stop",),
        structured_output=StructuredOutput(regex="SECRET-[a-z]+"),
    )
    request = llm._make_choices("SECRET prompt\n", params)[0]
    llm.engine.add_request(request)
    path = dump_crash(llm.engine, raised("SECRET"))
    llm.engine.abort(request.request_id)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert "SECRET" not in text
    dump = json.loads(text)
    assert dump["requests"][0]["sampling_params"]["max_tokens"] == 4
    assert dump["error"][0] == "builtins.RuntimeError"
    assert "builtins.ValueError" in dump["error"]
    assert any(line.endswith("in raised") for line in dump["error"])


def test_a_dump_is_for_its_owner_and_its_name_cannot_be_guessed(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = os.umask(0)
    try:
        first, second = (dump_crash(llm.engine, RuntimeError()) for _ in range(2))
    finally:
        os.umask(old)
    assert first is not None
    assert second is not None
    assert first.parent == second.parent
    assert first.stat().st_mode & 0o777 == 0o600
    assert first.parent.stat().st_mode & 0o777 == 0o700
    parts = [path.stem.rpartition("-")[2] for path in (first, second)]
    assert parts[0] != parts[1]
    assert [len(part) for part in parts] == [16, 16]


def test_a_folder_that_somebody_made_before_us_is_not_used(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    planted = tmp_path / f"{crash_dump.PREFIX}dumps-{os.geteuid()}"
    planted.symlink_to(tmp_path / "elsewhere")
    path = dump_crash(llm.engine, RuntimeError())
    assert path is not None
    assert path.parent not in (planted, tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_planted_name_is_not_written_through(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("secrets.token_hex", lambda n: "0")
    monkeypatch.setattr("time.strftime", lambda form: "now")
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / f"{crash_dump.PREFIX}now-{os.getpid()}-0.json").symlink_to(victim)
    assert dump_crash(llm.engine, RuntimeError()) is None
    assert victim.read_text() == "untouched"


def test_only_the_latest_dumps_are_kept(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "other.json").touch()
    for number in range(crash_dump.MAX_DUMPS + 5):
        (tmp_path / f"{crash_dump.PREFIX}2000-{number:03}.json").touch()
    path = dump_crash(llm.engine, RuntimeError())
    kept = sorted(tmp_path.glob(f"{crash_dump.PREFIX}*"))
    assert len(kept) == crash_dump.MAX_DUMPS
    assert kept[-1] == path
    assert kept[0].name == f"{crash_dump.PREFIX}2000-006.json"
    assert (tmp_path / "other.json").exists()
