"""Try to learn another tenant's prompts from a real system's times and cached tokens.

Router, prefill node and decode node are separate processes; each tenant has a key. In each round
the victim sends one of two new prompts, chosen at random. The attacker then sends the first of the
two prompts, and decides from this request's time to the first token, or from its `cached_tokens`,
whether the victim has sent the same prompt. The area under the ROC curve is 0.5 for an attacker
whose answers are random, and 1 for an attacker who always knows.

    python -m benchmarks tenant_isolation --save

There are two controls. The first is the same attack between tenants that share their cache, where
times must reveal the victim's prompt (otherwise the attack proves nothing). The second is the hit
rate of one tenant's own prompts, with keys and without.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton import Client, SamplingParams
from baton.access.api_keys import draw_key, entry_text
from benchmarks.runner.deployments import deployed
from benchmarks.runner.run import Document, Run

VOCAB_SIZE = 900
PROMPT_TOKENS = 240
MOST_AUC = 0.55
LEAST_CONTROL_AUC = 0.9
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
TENANTS = {"victim": "", "attacker": "", "member": "team", "spy": "team"}


@dataclass(frozen=True, slots=True)
class Probe:
    """One round of the attacker; ``sent``: whether the victim had sent this prompt."""

    sent: bool
    ttft_s: float
    num_cached_tokens: int


@contextmanager
def running(*, keys: bool) -> Iterator[dict[str, Client]]:
    """Run a deployment; yield each tenant's client. Without keys, all are the same tenant."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        made = {name: draw_key() for name in TENANTS}
        path = Path(folder, "keys.toml")
        tables = [
            entry_text(made[name], name) + (f'cache_group = "{group}"\n' if group else "")
            for name, group in TENANTS.items()
        ]
        path.write_text("\n".join(tables), encoding="utf-8")
        # Without this option, some prompts would be computed, and cached, only on the decode node.
        router_args = ["--no-local-prefill", *(["--api-keys-file", str(path)] if keys else [])]
        with deployed(router_args=router_args) as site:
            clients = {
                name: Client(site.config.listen, api_key=key if keys else None)
                for name, key in made.items()
            }
            yield clients
            for client in clients.values():
                client.close()


def ask(client: Client, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first and only token, and the number of cached tokens."""
    began = time.perf_counter()
    completion = client.generate(prompt, PARAMS, timeout_s=60)
    took_s = time.perf_counter() - began
    assert completion.receipt is not None
    return took_s, completion.receipt.num_cached_tokens


def draw_prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]


def attack(victim: Client, attacker: Client, num_probes: int, seed: int) -> list[Probe]:
    draw = random.Random(seed)
    probes = []
    for _ in range(num_probes):
        guessed, other = draw_prompt(draw), draw_prompt(draw)
        sent = draw.random() < 0.5
        ask(victim, guessed if sent else other)
        probes.append(Probe(sent, *ask(attacker, guessed)))
    return probes


def auc(scores: Sequence[tuple[bool, float]]) -> float:
    """Return the AUC of scores that show "sent" by high values, or by low ones if that is larger.

    The AUC is the probability that a sent prompt has a higher score than a prompt that was not sent
    (Mann and Whitney).
    """
    ordered = sorted(score for _, score in scores)
    first = {score: index for index, score in reversed(list(enumerate(ordered)))}
    last = {score: index for index, score in enumerate(ordered)}
    ranks = [(first[score] + last[score]) / 2 + 1 for sent, score in scores if sent]
    num_sent, num_others = len(ranks), len(scores) - len(ranks)
    area = (sum(ranks) - num_sent * (num_sent + 1) / 2) / (num_sent * num_others)
    return max(area, 1 - area)


def judge(probes: Sequence[Probe]) -> dict[str, float]:
    return {
        "probes": len(probes),
        "auc_ttft": round(auc([(p.sent, -p.ttft_s) for p in probes]), 4),
        "auc_cached_tokens": round(auc([(p.sent, p.num_cached_tokens) for p in probes]), 4),
        "median_ttft_sent_ms": round(1e3 * _median([p.ttft_s for p in probes if p.sent]), 2),
        "median_ttft_other_ms": round(1e3 * _median([p.ttft_s for p in probes if not p.sent]), 2),
    }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def own_hit_rate(client: Client, num_sessions: int, seed: int) -> float:
    """Return the share of cached tokens in a tenant's own prompts, which grow turn by turn."""
    draw = random.Random(seed)
    num_cached = num_tokens = 0
    for _ in range(num_sessions):
        prompt = draw_prompt(draw)[:160]
        for _ in range(4):
            num_cached += ask(client, prompt)[1]
            num_tokens += len(prompt)
            prompt = [*prompt, *draw_prompt(draw)[:80]]
    return num_cached / num_tokens


def run(
    run: Run, probes: int = 2000, control_probes: int = 100, sessions: int = 10, seed: int = 1
) -> Document:
    """Attack other tenants, and tenants that share a cache; measure a tenant's own hit rate."""
    rates = {}
    for keys in (False, True):
        with running(keys=keys) as clients:
            ask(clients["member"], draw_prompt(random.Random(0)))  # warm
            name = "with_keys" if keys else "without_keys"
            rates[name] = own_hit_rate(clients["victim"], sessions, seed)
            if keys:
                group = judge(attack(clients["member"], clients["spy"], control_probes, seed))
                apart = judge(attack(clients["victim"], clients["attacker"], probes, seed + 1))
    run.problems += [
        f"{name} of the attack is {apart[name]}, at most {MOST_AUC}"
        for name in ("auc_ttft", "auc_cached_tokens")
        if apart[name] > MOST_AUC
    ]
    if group["auc_ttft"] < LEAST_CONTROL_AUC:
        run.problems.append(f"the attack is no good: {group['auc_ttft']} where times must tell")
    if group["auc_cached_tokens"] > MOST_AUC:
        run.problems.append("in a group, cached_tokens tells what others sent")
    if rates["with_keys"] != rates["without_keys"] or not rates["with_keys"]:
        run.problems.append(f"the hit rate within a tenant is another one: {rates}")
    problems = list(run.problems)
    return {"apart": apart, "group": group, "hit_rate": rates, "problems": problems}
