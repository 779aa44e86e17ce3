"""Tests of tenants in a real split system: what a tenant can learn of another, and its limits."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import Client, Completion, SamplingParams
from baton.access.api_keys import entry_text
from baton.api.errors import InvalidRequestError, OverloadedError
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import run_deployment

pytestmark = pytest.mark.large

# Name and what else the table of its key says.
KEYS = {
    "alice": "",
    "bob": "",
    "carol": 'cache_group = "team"',
    "dave": 'cache_group = "team"',
    "limited": "limits = { requests_per_minute = 2 }",
    "hurried": "limits = { most_urgent_priority = -5 }",
}
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


def key_of(name: str) -> str:
    return f"a long enough key of {name}".replace(" ", "-")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """A router with keys, a prefill node and a decode node."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    tables = [entry_text(key_of(name), name) + more + "\n" for name, more in KEYS.items()]
    keys.write_text("\n".join(tables), encoding="utf-8")
    router_args = ["--api-keys-file", str(keys)]
    with run_deployment(
        http=True, router_args=router_args, admin_token="made for this test"
    ) as running:
        yield running


def ask(site: LocalDeployment, name: str, prompt: list[int], priority: int = 0) -> Completion:
    with Client(site.config.listen, api_key=key_of(name)) as client:
        return client.generate(prompt, PARAMS, priority=priority, timeout_s=60)


def num_cached(completion: Completion) -> int:
    assert completion.receipt is not None
    return completion.receipt.num_cached_tokens


def prompt_of(number: int) -> list[int]:
    return [100 + number, *(1 + (7 * i + number) % 900 for i in range(199))]


def test_what_another_tenant_sent_is_not_cached_and_what_one_sent_oneself_is(
    site: LocalDeployment,
) -> None:
    first = ask(site, "alice", prompt_of(0))
    other = ask(site, "bob", prompt_of(0))
    again = ask(site, "alice", prompt_of(0))
    assert [num_cached(one) for one in (first, other, again)] == [0, 0, 192]
    assert other.receipt is not None
    assert other.receipt.decode is not None
    assert other.receipt.decode.num_cached_tokens == 0  # neither on the decode node
    assert other.receipt.decode.push.num_blocks == 13
    assert first.token_ids == other.token_ids == again.token_ids  # a salt changes no token


def test_a_group_shares_what_is_cached_and_is_told_of_its_own(site: LocalDeployment) -> None:
    first = ask(site, "carol", prompt_of(1))
    other = ask(site, "dave", prompt_of(1))
    again = ask(site, "dave", prompt_of(1))
    assert [num_cached(one) for one in (first, other, again)] == [0, 0, 192]
    # It was shared all the same; operators' numbers say so.
    found = dict(ask_metrics(site))
    assert found["baton_router_cached_prompt_tokens_total"] >= 2 * 192
    stranger = ask(site, "alice", prompt_of(1))
    assert num_cached(stranger) == 0


def ask_metrics(site: LocalDeployment) -> Iterator[tuple[str, float]]:
    url = f"http://{site.config.http_listen}/metrics"
    headers = {"Authorization": f"Bearer {site.config.admin_token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
        for line in response.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and "{" not in name:
                yield name, float(value)


def test_who_may_not_be_more_urgent_than_others_is_told_so(site: LocalDeployment) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"priority: must be 0 or more with this API key, got -1"
    ):
        ask(site, "bob", [1, 2, 3], priority=-1)
    assert ask(site, "bob", [1, 2, 3], priority=7).token_ids
    assert ask(site, "hurried", [1, 2, 3], priority=-5).token_ids


def test_a_key_that_used_its_part_is_told_when_to_come_again(site: LocalDeployment) -> None:
    for _ in range(2):
        ask(site, "limited", [1, 2, 3])
    with pytest.raises(OverloadedError, match="has used its 2 requests per minute") as refused:
        ask(site, "limited", [1, 2, 3])
    assert refused.value.retry_delay_s is not None
    assert 0 < refused.value.retry_delay_s <= 30
    request = urllib.request.Request(
        f"http://{site.config.http_listen}/v1/completions",
        data=json.dumps({"model": str(DEMO_MODEL), "prompt": "x", "max_tokens": 1}).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key_of('limited')}",
        },
    )
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(request)
    headers = answer.value.headers
    assert answer.value.code == 429
    assert 1 <= int(headers["Retry-After"]) <= math.ceil(refused.value.retry_delay_s)
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"].endswith("ms")
    assert ask(site, "alice", [1, 2, 3]).token_ids  # nobody else's part
    answer.value.close()


def test_no_log_has_a_salt(site: LocalDeployment) -> None:
    """Look for salts, and for anything like one: 32 bytes in hex or as Python writes bytes."""
    logs: list[Path] = [child.log for child in site.children]
    for log in logs:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert "cache_salt=" not in text
        assert "cache_salt:" not in text
