"""The whole system's state machine, with nodes that fetch cached prefixes from each other.

See `test_whole_system.py` for what may happen, and what must hold. Besides: at the end, each node
can fetch from each other node again, and no transfer of a prefix holds a block. The contents of all
cached blocks are compared with the contents that their names promise.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings

from baton.api.sampling_params import SamplingParams
from node_runtime.prefixes.prefixes import Prefixes
from prefill_node.options import PushMode
from prefill_node.supplies import Supplies
from tests.fakes.system.node_process import NodeProcess
from tests.fakes.system.whole_system import System
from tests.property.num_examples import num_examples
from tests.property.system_machine import MAX_PROMPT_TOKENS
from tests.property.test_handoff import prompt_of
from tests.property.test_whole_system import WholeSystemMachine


class FetchingSystemMachine(WholeSystemMachine):
    """All that may happen to a cluster whose nodes fetch prefixes."""

    fetches = True


def counts_of(system: System) -> Counter[str]:
    """Return the numbers of all nodes' fetches, by what became of them."""
    return sum((Counter(_fetched(one)) for one in system.by_id.values()), Counter[str]())


def _fetched(process: NodeProcess) -> dict[str, int]:
    side_work = process.node.side_work
    prefixes = side_work.prefixes if isinstance(side_work, Supplies) else side_work
    assert isinstance(prefixes, Prefixes)
    assert prefixes.fetches is not None
    return prefixes.fetches.counts.by_state()


@pytest.mark.parametrize("dies", [False, True])
def test_a_prompt_comes_from_another_node_which_may_die(dies: bool) -> None:
    """Do surely what the machine does at random: fetch a prefix, and end the node that sends it."""
    machine = FetchingSystemMachine()
    machine.make(
        num_blocks=20,
        mixed=False,
        async_scheduling=True,
        push_mode=PushMode.LAYERS,
        kv_digests=True,
        max_receiving_requests=64,
        local_prefill_threshold=0,
        preemption="recompute",
        policy="round_robin",
        router_is_busy=False,
        sometimes_alone=False,
        rounds_per_step=4,
        chunk_s=0.0,
        index_is_small=False,
        num_drafts=0,
        restarts_at_end=True,
    )
    system, params = machine.system, SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    for number in range(2):
        machine._call(f"r{number}", prompt_of(1, MAX_PROMPT_TOKENS), params)
        for _ in range(200):
            if number and dies and counts_of(system)["expected"]:
                break
            if all(client.is_done for client in system.clients):
                break
            system.flow()
        system.check()
        if not dies:
            system.settle()
    if dies:
        machine.is_faulty = True
        [holder] = [name for name, one in system.processes.items() if one.node.side_work.held()]
        system.kill(holder, quietly=False)
    machine.teardown()
    found = counts_of(system)
    assert found["expected"] > 0
    assert found["received"] + found["lost"] == found["expected"]
    assert bool(found["lost"]) is dies


TestWholeSystemWithFetches = FetchingSystemMachine.TestCase
TestWholeSystemWithFetches.settings = settings(
    max_examples=num_examples(3), stateful_step_count=60, deadline=None
)
