"""Tests of published coding agents against a real router whose model follows a script.

`make test-clients` runs this after `run_all.py`; `-k codex` runs one agent. Each agent works
through a session: it writes a file, changes the file, runs a command, gets an answer that is cut,
sends the cut answer back, is interrupted, goes on, and sends a prompt that is too long.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from baton.checkpoint.gguf.folder import folder_of_gguf
from baton.checkpoint.packaged_model import SMOLLM2
from examples.demo import fetch_model
from tests.clients.agents.agents import AGENTS, Agent
from tests.clients.agents.environments import command, npm
from tests.clients.agents.recorder import Exchange
from tests.clients.agents.scripted_system import BLOCK_SIZE, ScriptedSystem
from tests.clients.agents.sessions import (
    ADDED,
    CAME_BACK,
    EDITED,
    FILE,
    FIRST_TEXT,
    REACHED,
    SECOND_TEXT,
    SUM,
    WENT_ON,
    WRITTEN,
    script,
)
from tests.clients.agents.settings import read_settings
from tests.fakes.time.waiting import wait_until

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(600),
    pytest.mark.skipif(npm() is None, reason="npm is not here: the agents come from it"),
]

TURN_TIMEOUT_S = 90.0
TOO_LONG_TIMEOUT_S = 60.0  # whoever tries again and again takes minutes
ENOUGH_OF_AN_ANSWER_BYTES = 4000
NUM_DIGITS = 70_000  # the tokenizer makes one token of each
SPLIT, COLOCATED = 1, 0  # prefill nodes
CUT = {"length", "max_tokens", "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class Turn:
    """How a turn ended.

    Attributes:
        output: what the agent printed.
        exchanges: its requests to the router, with the answers.
    """

    output: str
    exchanges: Sequence[Exchange]

    @property
    def endings(self) -> set[str]:
        """Return why the answers of this turn ended, in the words of the three APIs."""
        return {ending for exchange in self.exchanges for ending in exchange.endings()}


class Session:
    """An agent that works in a folder, with a home of its own and settings of the page."""

    def __init__(self, agent: Agent, system: ScriptedSystem, folder: Path) -> None:
        self._agent = agent
        self._system = system
        self.work, home = folder / "work", folder / "home"
        for path in (self.work, home):
            path.mkdir()
        settings = read_settings()[agent.package].at(system.address)
        for name, content in settings.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(content, encoding="utf-8")
        proxy = f"http://{system.address}"
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            **settings.variables,
            **agent.environment,
        }
        self._goes_on = False

    @property
    def text(self) -> str:
        """Return the content of the file that the agent works on."""
        return (self.work / FILE).read_text(encoding="utf-8")

    def ask(self, prompt: str, *, interrupt: bool = False) -> Turn:
        """Have the agent do a turn.

        Args:
            interrupt: press Ctrl-C once some of an answer has come.
        """
        exchanges = self._system.recorder.exchanges
        first = len(exchanges)
        process = subprocess.Popen(
            [str(command(self._agent)), *self._agent.ask(prompt, self._goes_on)],
            cwd=self.work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._goes_on = True
        try:
            if interrupt:
                wait_until(
                    lambda: any(
                        len(exchange.answer) > ENOUGH_OF_AN_ANSWER_BYTES
                        for exchange in exchanges[first:]
                    ),
                    "that some of an answer has come",
                    timeout_s=TURN_TIMEOUT_S,
                )
                os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=TURN_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        turn = Turn(output, exchanges[first:])
        print(f"\n--- {self._agent.name}: {prompt[:40]}\n{output[-600:]}")
        for exchange in turn.exchanges:
            print(f"    {exchange.path} {exchange.status} {exchange.usage()}")
        return turn


@pytest.mark.parametrize("num_prefill", [SPLIT, COLOCATED], ids=["split", "colocated"])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_a_session(agent: Agent, num_prefill: int, tmp_path: Path) -> None:
    model = fetch_model(Console(), SMOLLM2)
    assert model is not None, f"{SMOLLM2.requirement} cannot be had"
    with ScriptedSystem(
        folder_of_gguf(Path(model)),
        tmp_path / "model",
        num_prefill=num_prefill,
        script=script(agent.tools, str(tmp_path / "work")),
    ) as system:
        session = Session(agent, system, tmp_path)
        check_tools(agent, session)
        check_cut_answer(session)
        check_interruption(system, session)
        assert [exchange for exchange in system.recorder.exchanges if exchange.status >= 400] == []
        check_cached(system, is_split=num_prefill == SPLIT)
        check_too_long_prompt(agent, session)
        assert system.recorder.elsewhere == []
        assert system.metric("baton_router_requests_open") == 0


def check_tools(agent: Agent, session: Session) -> None:
    """Files are as the script has them; who calls tools gets another answer behind each call."""
    for prompt, text, answer in (
        ("TASK-1: write the file.", FIRST_TEXT, WRITTEN),
        ("TASK-2: change the file.", SECOND_TEXT, EDITED),
    ):
        turn = session.ask(prompt)
        assert session.text == text
        assert answer in turn.output or not agent.tools.mark
    if agent.tools.shell is not None:
        turn = session.ask("TASK-3: add the numbers.")
        assert ADDED in turn.output
        assert SUM.encode() in turn.exchanges[-1].body


def check_cut_answer(session: Session) -> None:
    """An answer that max_tokens ends is sent back as far as it came."""
    assert session.ask("TASK-4: count.").endings & CUT
    turn = session.ask("TASK-5: go on.")
    assert WENT_ON in turn.output
    assert REACHED.encode() in turn.exchanges[-1].body


def check_interruption(system: ScriptedSystem, session: Session) -> None:
    """An agent that is interrupted leaves no request open, and can go on."""
    session.ask("TASK-6: count again.", interrupt=True)
    wait_until(lambda: system.metric("baton_router_requests_open") == 0, "that no request is open")
    assert CAME_BACK in session.ask("TASK-7: are you there?").output


def check_cached(system: ScriptedSystem, *, is_split: bool) -> None:
    """Check that prompts find in a cache what they share with earlier ones.

    A split system may compute a prompt on its prefill node, which lacks the answers to earlier
    prompts; a colocated node has these, too. Where an agent asks for no usage, the router's count
    is checked instead, which has the prompts of answers that came to their end.
    """
    asked = list(system.outputs.asked.values())
    usages = [exchange.usage() for exchange in system.recorder.exchanges]
    all_shared = 0
    for number, one in enumerate(asked):
        earlier = [other.prompt if is_split else other.token_ids for other in asked[:number]]
        shared = max((num_shared(one.prompt, other) for other in earlier), default=0)
        cached = [
            usage.cached_tokens
            for usage in usages
            if usage is not None and usage.prompt_tokens == len(one.prompt)
        ]
        print(f"prompt {len(one.prompt)}: shared {shared}, cached {cached}")
        assert not cached or max(cached) > 0.99 * shared - BLOCK_SIZE
        all_shared += shared if system.outputs.has_ended(one) else 0
    if not any(usages):
        all_cached = system.metric("baton_router_cached_prompt_tokens_total")
        assert all_cached > 0.99 * all_shared - BLOCK_SIZE * len(asked) > 0


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_too_long_prompt(agent: Agent, session: Session) -> None:
    began = time.monotonic()
    turn = session.ask("TASK-8: " + "1234567890" * (NUM_DIGITS // 10))
    assert time.monotonic() - began < TOO_LONG_TIMEOUT_S
    assert re.search(agent.too_long, turn.output)
    assert {exchange.status for exchange in turn.exchanges} <= {200, 400}
