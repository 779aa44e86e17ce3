"""Unit tests of the table of names: which model a name means, and how that changes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import (
    ConfigError,
    InvalidRequestError,
    NodeUnavailableError,
    NotFoundError,
    PermissionDeniedError,
)
from router.names.defaults import NameDefaults
from router.names.names_file import NamesFile
from router.names.served_name import ServedName
from router.names.table import NameTable
from tests.fakes.router.named_models import NamedModel, NamedModels
from tests.fakes.router.router_scene import asynchronous

DIGEST = "0123456789abcdef" * 4


@asynchronous
async def test_a_name_stands_for_a_base_model_and_no_name_for_the_first() -> None:
    models = NamedModels()
    assert models.table.resolve("b", ANYBODY).base is models.b.base
    assert models.table.resolve(None, ANYBODY).base is models.a.base
    with pytest.raises(NotFoundError, match=r"^model: 'c' does not exist here, 'a', 'b' are serv"):
        models.table.resolve("c", ANYBODY)


@asynchronous
async def test_a_long_unknown_name_and_many_known_names_make_one_short_line() -> None:
    base = NamedModel("a").base
    table = NameTable([base], [ServedName(name=f"n{i}", base=base) for i in range(20)])
    with pytest.raises(NotFoundError) as raised:
        table.resolve("x" * 10_000, ANYBODY)
    assert len(str(raised.value)) < 250
    assert str(raised.value).endswith("'n7' and 12 more are served")


@asynchronous
async def test_a_key_that_is_limited_to_names_may_use_these_only() -> None:
    table = NamedModels().table
    limited = Principal(name="k", models=frozenset({"b"}))
    assert table.resolve("b", limited).name == "b"
    assert table.resolve(None, limited).name == "b"
    assert [one.name for one in table.served_to(limited)] == ["b"]
    with pytest.raises(PermissionDeniedError, match=r"^model: k may not use 'a'$"):
        table.resolve("a", limited)
    with pytest.raises(NotFoundError, match=r"'c' does not exist here, 'b' is served$"):
        table.resolve("c", limited)


@asynchronous
async def test_a_name_without_nodes_is_refused_at_once_unless_nodes_may_come_back() -> None:
    models = NamedModels([NamedModel("a"), NamedModel("b", has_nodes=False)])
    with pytest.raises(NodeUnavailableError, match=r"^model: no node of 'b' has joined$"):
        models.table.resolve("b", ANYBODY)
    models.b.join()
    assert models.table.resolve("b", ANYBODY).name == "b"
    for node in models.b.nodes:
        node.leave()  # by themselves: processes may be started again
    assert models.table.resolve("b", ANYBODY).name == "b"


@asynchronous
async def test_a_router_of_one_base_model_lets_requests_wait_for_nodes() -> None:
    base = NamedModel("a", has_nodes=False).base
    assert NameTable([base], [ServedName(name="a", base=base)]).resolve("a", ANYBODY).base is base


@asynchronous
async def test_an_adapter_that_no_node_can_load_is_refused_and_never_served_by_the_base() -> None:
    model = NamedModel("a")
    names = [ServedName(name="tuned", base=model.base, adapter=DIGEST)]
    table = NameTable([model.base], names)
    why = r"^model: no node of 'a' can load the adapter 0123456789ab: its folder is not known$"
    with pytest.raises(NodeUnavailableError, match=why):
        table.resolve("tuned", ANYBODY)
    for one in model.nodes:
        one.node.load.adapters = frozenset({DIGEST})
    assert table.resolve("tuned", ANYBODY).adapter == DIGEST


@asynchronous
async def test_a_switch_changes_what_later_requests_get_and_nothing_of_earlier_ones() -> None:
    models = NamedModels()
    before = models.table.resolve("a", ANYBODY)
    await models.table.set_name(dataclasses.replace(models.table.find("b"), name="a"))
    assert before.base is models.a.base
    assert models.table.resolve("a", ANYBODY).base is models.b.base
    assert models.table.names == ("a", "b")  # the default name keeps its place


@asynchronous
async def test_a_removed_name_is_unknown_and_the_last_one_stays() -> None:
    table = NamedModels().table
    await table.remove("a")
    with pytest.raises(NotFoundError):
        table.resolve("a", ANYBODY)
    with pytest.raises(NotFoundError):
        await table.remove("a")
    with pytest.raises(InvalidRequestError, match=r"^name: 'b' is the last one, and so it stays$"):
        await table.remove("b")


def test_too_many_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynchronous
    async def run() -> None:
        table = NamedModels().table
        monkeypatch.setattr("router.names.table.MAX_NAMES", 2)
        with pytest.raises(InvalidRequestError, match=r"names: must be 1 to 2, got 3"):
            await table.set_name(dataclasses.replace(table.find("b"), name="c"))
        assert table.names == ("a", "b")

    run()


def test_a_restarted_router_has_the_names_that_an_operator_set(tmp_path: Path) -> None:
    path = tmp_path / "names.toml"

    async def change() -> None:
        models = NamedModels(file=path)
        served = ServedName(
            name='odd "name"\\ é\U0001f600',
            base=models.b.base,
            adapter=DIGEST,
            defaults=NameDefaults(sampling={"temperature": 0.25, "top_k": 20}, max_tokens=7),
            chat_template="{% for m in messages %}\n'''{{ m.content }}\x7f\"{% endfor %}",
        )
        await asyncio.gather(models.table.set_name(served), models.table.remove("a"))
        again = NamedModels(models=[models.a, models.b])
        assert NamesFile(path).read(again.table.bases) == [models.table.find("b"), served]

    asyncio.run(change())
    assert [one.name for one in tmp_path.iterdir()] == ["names.toml"]


@asynchronous
async def test_a_change_that_the_file_cannot_take_is_not_made() -> None:
    models = NamedModels(file=Path("/proc/names.toml"))
    with pytest.raises(InvalidRequestError, match=r"names_file: /proc/names.toml: cannot be wri"):
        await models.table.remove("a")
    assert models.table.names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('["a"]\nmodel = "c"', r"\[a\] model: must be as in --model \(a, b\), got 'c'"),
        ('["a"]\nadapter = "xyz"', r"\[a\] adapter: must be 64 hex characters in lower case"),
        ('["a"]\nadapter = 7', r"\[a\] adapter: must be a text, got 7"),
        ('["a"]\nadapter_source = "x\\n"', r"\[a\] adapter_source: must have at most 1024"),
        ('["a"]\npins_adapter = "yes"', r"\[a\] pins_adapter: must be true or false, got 'yes'"),
        ('["a"]\nlora = "x"', r"\[a\] lora: must be one of model, adapter, adapter_source, "),
        ('["a"]\nrequest_defaults = "seed=1"', r"\[a\] request_defaults: must have keys of"),
        ('["a"]\nchat_template = "{% if %}"', r"\[a\] .*chat template in a is broken"),
        ('a = "b"', r"a: must be a table, got a value"),
        ('["a\\n"]\n', r"\[a\n\] name: must have 1 to 256 printable characters"),
        ('["a"', r"Expected"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_file_name_and_key(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "names.toml"
    path.write_text(text, encoding="utf-8")

    @asynchronous
    async def read() -> None:
        with pytest.raises(ConfigError, match=f"^names_file: {path}: {problem}"):
            NamesFile(path).read(NamedModels().table.bases)

    read()


def test_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynchronous
    async def run() -> None:
        table = NamedModels().table
        await table.set_name(dataclasses.replace(table.find("b"), name="c", adapter=DIGEST))
        await table.remove("a")

    with caplog.at_level(logging.INFO, logger="router.names.table"):
        run()
    assert caplog.messages == [f"name c: b, adapter {DIGEST}", "name a: removed"]


class SlowFile(NamesFile):
    """A file whose writes wait until they may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_go_on = threading.Event()

    def write(self, names: Iterable[ServedName]) -> None:
        assert self.may_go_on.wait(10)
        super().write(names)


@asynchronous
async def test_a_change_whose_caller_gives_up_ends_whole_and_before_the_next() -> None:
    folder = tempfile.TemporaryDirectory()
    base, file = NamedModel("a").base, SlowFile(Path(folder.name, "names.toml"))
    table = NameTable([base], [ServedName(name="a", base=base)], file)
    given_up = asyncio.create_task(table.set_name(ServedName(name="b", base=base)))
    await asyncio.sleep(0.05)
    given_up.cancel()
    following = asyncio.create_task(table.set_name(ServedName(name="c", base=base)))
    await asyncio.sleep(0.05)
    assert not following.done()
    file.may_go_on.set()
    await following
    assert table.names == ("a", "b", "c")
    assert [one.name for one in file.read([base])] == ["a", "b", "c"]
    folder.cleanup()


@asynchronous
async def test_operators_find_a_base_model_whose_text_became_the_name_of_another() -> None:
    models = NamedModels()
    model = models.a.base.model
    await models.table.set_name(ServedName(name=model, base=models.b.base))
    assert models.table.resolve(model, ANYBODY).base is models.b.base
    assert models.table.find_base(model) is models.a.base
