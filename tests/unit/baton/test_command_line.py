"""All commands: help that fits 80 columns, options from the environment, one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
from typer.testing import CliRunner

from baton.cli.admin.app import COMMANDS as ADMIN_COMMANDS
from baton.cli.app import COMMANDS, app, help_of
from baton.cli.command_line import with_option_names
from baton.version import __version__

WIDTH = 80
BATON = f"Baton {__version__}"
ROOT: Any = typer.main.get_command(app)


def leaves(command: Any = ROOT, name: str = "baton") -> Iterator[tuple[str, Any]]:
    """Yield all commands that do something, with the words that call them."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    for word in command.list_commands(None):
        yield from leaves(command.get_command(None, word), f"{name} {word}")


def groups(command: Any = ROOT, name: str = "baton") -> Iterator[tuple[str, Any]]:
    if hasattr(command, "list_commands"):
        yield name, command
        for word in command.list_commands(None):
            yield from groups(command.get_command(None, word), f"{name} {word}")


ALL = dict(leaves())


def options(command: Any) -> list[typer.core.TyperOption]:
    return [one for one in command.params if isinstance(one, typer.core.TyperOption)]


def long_name(option: typer.core.TyperOption) -> str:
    return next(name for name in option.opts if name.startswith("--"))


def shown(command: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    context = command.context_class(command, info_name=name, **command.context_settings)
    text: str = command.get_help(context)
    return text


@pytest.mark.parametrize("name", ALL)
def test_the_help_names_every_option_in_full_within_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(ALL[name], name, monkeypatch)
    for option in options(ALL[name]):
        for word in (*option.opts, *option.secondary_opts):
            assert word in text.split() or f"{word}," in text.split()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text


@pytest.mark.parametrize("name", [name for name, _ in groups()])
def test_the_list_of_commands_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(dict(groups())[name], name, monkeypatch)
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("group", "name"),
    [*(("", n) for n in COMMANDS.names()), *(("admin", n) for n in ADMIN_COMMANDS.names())],
)
def test_the_list_says_of_a_command_what_its_own_help_says(
    group: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ROOT.get_command(None, group) if group else ROOT
    listed = " ".join(shown(command, "baton", monkeypatch).split())
    own = command.get_command(None, name).help
    assert own
    first = " ".join(own.split("\n\n")[0].split())
    sentence = first.partition(". ")[0].partition("; what")[0].removesuffix(".")
    assert f"{name} {sentence}" in listed


@pytest.mark.parametrize("name", ALL)
def test_every_option_can_be_given_by_a_variable_of_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ALL[name]
    context = command.context_class(command, info_name=name, **command.context_settings)
    for option in options(command):
        if long_name(option) == "--native-kernels":  # BATON_NATIVE_KERNELS means more than this
            continue
        variable = "BATON_" + long_name(option)[2:].replace("-", "_").upper()
        monkeypatch.setenv(variable, "given")
        assert option.resolve_envvar_value(context) == "given", variable
        monkeypatch.delenv(variable)


def baton(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    done = CliRunner(env=environment).invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_the_version(arguments: list[str]) -> None:
    assert baton(*arguments, BATON_VERSION="something else") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("words", [[], ["router"], ["admin"], ["admin", "explain"], ["keys"]])
def test_h_is_help(words: list[str]) -> None:
    assert baton(*words, "-h") == baton(*words, "--help")
    assert baton(*words, "-h")[0] == 0


def test_a_command_line_wins_over_the_environment_and_both_over_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    variables = {"BATON_TENANT": "theirs", "BATON_FILE": str(file), "BATON_ROLE": "look operate"}
    assert baton("keys", "new", "a", **variables)[0] == 0
    assert baton("keys", "new", "b", "--tenant", "ours", **variables)[0] == 0
    text = file.read_text(encoding="utf-8")
    assert ('tenant = "theirs"' in text, 'tenant = "ours"' in text) == (True, True)
    assert text.count('roles = ["look", "operate"]') == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv_cache_bytes: 10 holds 0 blocks", "--kv-cache-memory: 10 holds 0 blocks"),
        ("listen: cannot listen on 1.2.3.4:5", "--listen: cannot listen on 1.2.3.4:5"),
        ("tls_key: must be with tls_cert", "--tls-key: must be with BATON_TLS_CERT"),
        ("no_option: is wrong", "no_option: is wrong"),
    ],
)
def test_errors_name_options_as_users_write_them(text: str, expected: str) -> None:
    names = {"kv_cache_bytes": "--kv-cache-memory", "listen": "--listen", "tls_key": "--tls-key"}
    names["tls_cert"] = "BATON_TLS_CERT"
    assert with_option_names(text, names) == expected


def test_an_error_of_a_command_is_one_line_with_its_option() -> None:
    code, _, errors = baton("prefill", "--model", "x", "--block-size", "-1")
    assert (code, errors) == (2, "error: --block-size: must be 0 or more, got -1\n")
    code, _, errors = baton("generate", "x", "--max-tokens", "-1")
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith("error: --max-tokens: ")


@pytest.mark.medium
def test_help_waits_for_no_library_that_it_does_not_need() -> None:
    """Check the slowest imports, and the modules that bring them in."""
    code = (
        "import sys\nfrom baton.cli.app import app\n"
        "try: app(['--help'], prog_name='baton')\n"
        "except SystemExit: pass\n"
        "slow = 'grpc aiohttp asyncio cryptography rich.console pydantic uvloop google router'\n"
        "print([name for name in slow.split() if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stderr == "[]\n"


@pytest.mark.medium
def test_an_error_of_an_operators_command_names_its_option_too() -> None:
    """Regression: the error began ``router: ...``."""
    code, _, errors = baton("admin", "nodes", "--router", "127.0.0.1:1")
    assert code == 1
    assert errors == "error: --router: 127.0.0.1:1 cannot be reached (is it up?)\n"
    code, _, errors = baton("admin", "nodes", "--tls-ca", "no such file")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: --tls-ca: ")


def test_no_name_is_broken_at_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--admin-`` ended one line, ``token`` began the next."""
    for name, command in {**ALL, **dict(groups())}.items():
        for line in shown(command, name, monkeypatch).splitlines():
            assert not line.endswith("-"), (name, line)


EVERY = [name for name, _ in groups()] + list(ALL)


@pytest.mark.parametrize("name", EVERY[1:])
def test_help_that_is_made_fast_is_the_same(name: str) -> None:
    words = name.split()[1:]
    done = CliRunner().invoke(app, [*words, "-h"], prog_name="baton")
    assert help_of(words).split() == done.stdout.split()  # (the runner's lines are longer)


def test_words_that_call_nothing_have_no_fast_help() -> None:
    assert [help_of(words) for words in (["nothing"], ["keys", "nothing"], ["up", "x"])] == [""] * 3


HEAVY = {
    "aiohttp", "asyncio", "cryptography", "google.protobuf", "grpc", "numpy", "pydantic", "rich",
    "tokenizers", "torch", "uvloop",
}  # fmt: skip
SHOW_HELP = """\
import sys
from baton.cli.app import help_of
for name in sys.argv[1:]:
    assert help_of(name.split()[1:]), name
print(*sys.modules)
"""


@pytest.mark.medium
def test_who_asks_for_help_does_not_wait_for_what_the_commands_need() -> None:
    """Regression: help spent half a second of CPU on imports of gRPC, TLS and tokenizers."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW_HELP, *EVERY], capture_output=True, text=True, check=True
    )
    assert HEAVY & set(done.stdout.split()) == set()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("up", "--model: must be given: model folder, GGUF file, or hub id (see baton up --help)"),
        ("generate", "PROMPT: must be given: the text to complete (see baton generate --help)"),
        ("up --modle x", f"--modle: baton up of {BATON} has no such option; is it --model?"),
        ("up --warp 9", f"--warp: baton up of {BATON} has no such option; see baton up --help"),
        ("up x --listenn 1", f"--listenn: baton up of {BATON} has no such option; is it --listen?"),
        ("up x --max-model-len", "--max-model-len: needs a value"),
        (
            "up x --node-listen 127.0.0.1:0",
            "--node-listen: differs for each program; give it in --router-args, --prefill-args, "
            "--decode-args or --encode-args",
        ),
        ("--warp", f"--warp: baton of {BATON} has no such option; see baton --help"),
        ("up --model x --decode two", "--decode: must be a valid integer"),
        ("loadtest run --rate x", "--rate: must be a valid number"),
        ("admin nods", f"nods: {BATON} has no such command; is it nodes?"),
        ("serve --model x", f"serve: {BATON} has no such command; see baton --help"),
        ("doctor x", "Got unexpected extra argument(s) (x) (see baton doctor --help)"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_a_remedy(words: str, line: str) -> None:
    """Regression: usage errors took four lines, and named neither the version nor a remedy."""
    done = CliRunner().invoke(app, words.split(), prog_name="baton")
    assert (done.exit_code, done.output) == (2, f"error: {line}\n")


@pytest.mark.parametrize("command", [["chat"], ["generate", "x"]])
@pytest.mark.parametrize("address", ["localhost", "localhost:99999"])
def test_an_address_of_no_router_is_refused_before_anything_is_sent(
    command: list[str], address: str
) -> None:
    done = CliRunner().invoke(app, [*command, "--router", address], input="Hello\n")
    assert done.exit_code == 1
    assert done.stderr == f"error: --router: must be host:port, got '{address}'\n"


@pytest.mark.parametrize("value", ["x86-64-v3", "build", "0"])
def test_the_variable_of_native_kernels_is_no_boolean_option(value: str) -> None:
    """Regression: a node refused the name of an instruction set."""
    command = ["decode", "--model", "nowhere", "--router", "nonsense"]
    done = CliRunner().invoke(app, command, env={"BATON_NATIVE_KERNELS": value})
    assert "BATON_NATIVE_KERNELS" not in done.stderr
