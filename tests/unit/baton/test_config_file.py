"""Unit tests of configuration files: precedence, one-line refusals, and `config show`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.declared import make_or_refuse
from baton.deployment.local_deployment import LocalDeploymentConfig
from router.config import RouterConfig
from tools.options_page import PAGE, page

FLEET = """\
model = "of all"
max_attempts = 2
push = "chunks"

[router]
max_attempts = 4
drain_delay_s = 1
strict_fields = true

[decode]
router = ["r0:1", "r1:2"]
listen = "127.0.0.1:7"
kv_cache_memory = "2G"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET, encoding="utf-8")
    return path


def baton(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    done = CliRunner(env=environment).invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.stdout, done.stderr


def shown(program: str, *arguments: object, **environment: str) -> dict[str, list[str]]:
    """Return each option's value and where the value comes from."""
    code, text, errors = baton("config", "show", program, *arguments, **environment)
    assert (code, errors) == (0, "")
    lines = (re.split(r"\s{2,}", line) for line in text.splitlines())
    return {words[0]: words[1:] for words in lines}


def test_a_table_wins_over_what_is_for_all_and_that_over_the_default(file: Path) -> None:
    found = shown("router", "--config", file)
    assert found["model"] == ["of all", f"{file}: model"]
    assert found["max_attempts"] == ["4", f"{file}: [router] max_attempts"]
    assert found["drain_delay_s"] == ["1.0", f"{file}: [router] drain_delay_s"]
    assert found["strict_fields"] == ["true", f"{file}: [router] strict_fields"]
    assert found["max_ttft_s"] == ["0.0", "default"]


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(file: Path) -> None:
    environment = {"BATON_MAX_ATTEMPTS": "5", "BATON_CONFIG": str(file)}
    assert shown("router", **environment)["max_attempts"] == ["5", "BATON_MAX_ATTEMPTS"]
    found = shown("router", "--max-attempts", 6, "--no-strict-fields", **environment)
    assert found["max_attempts"] == ["6", "--max-attempts"]
    assert found["strict_fields"] == ["false", "--strict-fields"]


def test_each_program_takes_its_part_of_the_file(file: Path) -> None:
    prefill, decode = (shown(role, "--config", file) for role in ("prefill", "decode"))
    assert prefill["push"] == ["chunks", f"{file}: push"]
    assert "push" not in decode
    assert decode["listen"] == ["127.0.0.1:7", f"{file}: [decode] listen"]
    assert prefill["listen"] == ["127.0.0.1:0", "default"]
    assert decode["kv_cache_memory"][0] == "2G"
    assert decode["router"] == ["r0:1 r1:2", f"{file}: [decode] router"]


def test_no_secret_is_shown_and_what_must_be_given_is_said() -> None:
    _, text, _ = baton("config", "show", "router", "--admin-token", "s3cret", BATON_NODE_TOKEN="pw")
    assert "s3cret" not in text
    assert "pw" not in text
    assert text.count("(given, and not shown)") == 2
    assert "must be given" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("modle = 1", "modle: no program has such an option"),
        ("[decode]\npush = 'chunks'", "[decode] push: `baton decode` has no such option"),
        (
            "[rooter]",
            "[rooter]: must be one of up, router, prefill, decode, encode, sim-node, "
            "loadtest-run, loadtest-compare, loadtest-tune",
        ),
        ("block_size = '3'", "block_size: must be an integer, got a string"),
        (
            "[decode]\nblock_size = 1.5",
            "[decode] block_size: must be an integer, got a number that is not an integer",
        ),
        ("[decode]\nblock_size = -1", "[decode] block_size: must be 0 or more, got -1"),
        (
            "[decode]\nkv_cache_memory = 3",
            "[decode] kv_cache_memory: must be a string, got an integer",
        ),
        ("listen = 'x:1'", "listen: each program has its own; put it in a table such as [router]"),
        ("router = []", "router: each program has its own; put it in a table such as [router]"),
        ("admin_token = 'x'", "admin_token: is a secret; give it as BATON_ADMIN_TOKEN"),
        ("[decode", "Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_one_line(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(text, encoding="utf-8")
    for command in (["decode"], ["config", "show", "decode"]):
        code, _, errors = baton(*command, "--model", "no such model", "--config", path)
        assert (code, errors) == (2, f"error: {path}: {problem}\n")


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("BATON_BLOCK_SIZE", "-1", "must be 0 or more, got -1"),
        ("BATON_BLOCK_SIZE", "x", "must be a valid integer"),
        ("BATON_KV_CACHE_MEMORY", "much", "must be a number of bytes such as 512M or 2G, "
         "got 'much'"),
        ("BATON_LOG_LEVEL", "loud", "must be one of debug, info, warning, error, got 'loud'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_variable_is_said_with_its_name(
    variable: str, value: str, problem: str
) -> None:
    code, _, errors = baton("decode", "--model", "no such model", **{variable: value})
    assert (code, errors) == (2, f"error: {variable}: {problem}\n")


def test_the_page_of_settings_shows_an_error_that_the_program_says() -> None:
    """Regression: the page showed a limit that the option no longer had."""
    text = (PAGE.parent / "settings.md").read_text(encoding="utf-8")
    shown = re.findall(r"^error: (BATON_\w+): (.* got (.+))$", text, re.MULTILINE)
    assert shown
    for variable, problem, value in shown:
        code, _, errors = baton("decode", "--model", "no such model", **{variable: value})
        assert (code, errors) == (2, f"error: {variable}: {problem}\n")


def test_a_file_that_is_not_there_is_no_file() -> None:
    code, _, errors = baton("router", "--model", "x", "--config", "no/such/file")
    assert (code, errors) == (
        2, "error: no/such/file: cannot be read (No such file or directory)\n",
    )  # fmt: skip


def test_the_page_of_options_is_what_is_declared() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_up_passes_on_what_is_its_own_and_not_what_all_read_themselves(
    tmp_path: Path, started: list[LocalDeploymentConfig]
) -> None:
    """A default that `up` passed on would win over the router's table."""
    path = tmp_path / "fleet.toml"
    path.write_text(
        "model = 'm'\ndtype = 'float16'\n[up]\ndecode = 2\npolicy = 'round_robin'\n"
        "tool_call_parser = 'hermes'\n[router]\napi_keys_file = 'keys.toml'\n",
        encoding="utf-8",
    )
    variables = {"BATON_TOOL_CALL_PARSER": "none", "BATON_KV_CACHE_DTYPE": "fp8"}
    arguments = ["--kv-cache-memory", "1G", "--prefill-args", "--push chunks"]
    code, _, errors = baton("up", "--config", path, *arguments, **variables)
    assert (code, errors) == (0, "")
    [config] = started
    assert (config.model, config.num_prefill, config.num_decode) == ("m", 1, 2)
    assert config.router_args == [
        "--config", str(path), "--api-keys-file", "keys.toml", "--policy", "round_robin",
    ]  # fmt: skip
    assert config.node_args == ["--config", str(path), "--kv-cache-memory", "1G"]
    assert (config.prefill_args, config.decode_args) == (["--push", "chunks"], [])


def test_up_gives_each_option_to_the_programs_that_have_it(
    tmp_path: Path, started: list[LocalDeploymentConfig]
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("model = 'other'\n[up]\ndecode = 2\n", encoding="utf-8")
    code, _, errors = baton(
        "up", "m", "--pooling", "last", "n", "--max-model-len=64", "--no-local-prefill",
        "--kv-digests", "--trace-endpoint", "http://t", "--push", "chunks", "--inject-faults", "@f",
        "--config", path, "--prefill-args", "--push tail", "--encoder-cache-tokens", "5",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    [config] = started
    assert (config.models, config.num_decode) == (("m", "n"), 2)
    traced = ["--trace-endpoint", "http://t"]
    for_nodes = ["--kv-digests", *traced]
    assert config.router_args == [
        "--config", str(path), "--pooling", "last", "--no-local-prefill", *traced,
    ]  # fmt: skip
    assert config.node_args == ["--config", str(path)]
    length, faults = "--max-model-len=64", ["--inject-faults", "@f"]
    cache = ["--encoder-cache-tokens", "5"]
    assert config.prefill_args == [
        length, *for_nodes, "--push", "chunks", *faults, *cache, "--push", "tail",
    ]  # fmt: skip
    assert config.decode_args == [length, *for_nodes, *faults, *cache]
    assert config.encode_args == ["--config", str(path), *for_nodes, *faults, *cache]


@pytest.mark.parametrize("given", [["m", "--model", "n"], ["m", "n", "--model", "m"]])
def test_up_refuses_models_in_both_places(given: list[str]) -> None:
    code, _, errors = baton("up", *given)
    assert (code, errors) == (
        1,
        "error: --model: must be given as MODEL or with --model, not both\n",
    )


def test_several_models_come_from_the_line_the_file_or_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("[router]\nmodel = ['/a b', '/c']\n", encoding="utf-8")
    assert shown("router", "--config", path)["model"] == ["/a b /c", f"{path}: [router] model"]
    assert shown("router", "--model", "/a", "--model", "/c")["model"] == ["/a /c", "--model"]
    assert shown("router", "--model", "/a")["served_model_name"] == ['""', "default"]


@pytest.mark.parametrize(
    ("variable", "models"), [("/a b", ("/a b",)), ("/a b,/c", ("/a b", "/c")), ("/a", ("/a",))]
)
def test_a_variable_divides_models_at_commas_as_paths_may_have_spaces(
    variable: str, models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_MODEL", variable)
    given = {"model": variable.split()}  # by Typer
    config: RouterConfig = make_or_refuse(RouterConfig, given)
    assert config.models == models


def test_up_starts_each_model_and_divides_the_memory_among_them(
    started: list[LocalDeploymentConfig],
) -> None:
    names = ["--served-model-name", "x=/a", "--served-model-name", "y=/b"]
    models = ["--model", "/a", "--model", "/b", "--prefill", "2"]
    assert baton("up", *models, *names, "--kv-cache-memory", "1G")[0] == 0
    assert baton("up", *models)[0] == 0
    divided, measured = started
    assert divided.models == ("/a", "/b")
    assert divided.router_args == names
    assert divided.node_args[-2:] == ["--kv-cache-memory", str(2**29)]
    assert measured.node_args == []
    assert divided.nodes == [
        ("prefill", "p0", "/a"), ("prefill", "p1", "/a"),
        ("prefill", "p2", "/b"), ("prefill", "p3", "/b"),
        ("decode", "d0", "/a"), ("decode", "d1", "/b"),
    ]  # fmt: skip


def test_up_reads_the_tables_of_all_that_it_starts_before_it_starts_them(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("model = 'm'\n[decode]\npush = 'chunks'\n", encoding="utf-8")
    code, _, errors = baton("up", "--config", path)
    problem = f"{path}: [decode] push: `baton decode` has no such option"
    assert (code, errors) == (2, f"error: {problem}\n")


def test_a_load_test_reads_only_its_own_table(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text('model = "of the fleet"\n[loadtest-run]\nrate = 3.5\n', encoding="utf-8")
    rows = shown("loadtest-run", "--config", path)
    assert rows["rate"] == ["3.5", f"{path}: [loadtest-run] rate"]
    assert rows["model"] == ['""', "default"]
