"""Router, nodes and clients of the whole-system machine, their right answers, and what must hold.

Knows not what may happen to them: those rules are in `test_whole_system.py`.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

import engine.worker.worker
from baton.api.errors import DeadlineExceededError, OverloadedError
from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.engine_config import PREEMPTION, SCHEDULING_POLICIES
from baton.kv.block_hash import BlockHash
from baton.kv.prefixes import node_of
from decode_node.options import DecodeOptions
from kvconnector.peer_process import PeerProcess
from models import load_model
from prefill_node.options import PushMode
from router.fleet import prefix_sources
from router.policies import POLICIES
from tests.fakes.engine.cache_contents import contents_of
from tests.fakes.system.checked_client import Client
from tests.fakes.system.system_setup import Setup
from tests.fakes.system.whole_system import IDENTITY, System, num_pairs
from tests.property.test_handoff import folder, prompt_of, reference, reference_kv

MAX_PROMPT_TOKENS = 18
FAMILIES = range(3)  # of prompts that are prefixes of each other
SALTS = (b"", b"one", b"two")  # of tenants
LONG_S = 10_000.0  # nobody may need it

shared_model = functools.cache(load_model)  # weights only, and nobody writes them


@functools.cache
def expected_output(
    prompt: tuple[int, ...], params: SamplingParams, *, max_model_len: int, mixed: bool
) -> tuple[tuple[int, ...], FinishReason]:
    completion = reference(mixed=mixed).generate([list(prompt)], params)[0]
    assert completion.finish_reason is not None
    room = max_model_len - len(prompt)
    if len(completion.token_ids) > room:  # nodes with so little memory take no more
        return completion.token_ids[:room], FinishReason.LENGTH
    return completion.token_ids, completion.finish_reason


@functools.cache
def known_contents() -> dict[BlockHash, torch.Tensor]:
    """Return the contents of prompts' blocks by hash, for a model with one KV cache group."""
    prompts = [prompt_of(family, MAX_PROMPT_TOKENS) for family in FAMILIES]
    contents: dict[BlockHash, torch.Tensor] = {}
    for salt in SALTS:
        kv = ((p, reference_kv(tuple(p))) for p in prompts)
        contents |= contents_of({**reference().engine.compatibility, **IDENTITY}, kv, salt)
    return contents


class SystemMachine(RuleBasedStateMachine):
    """A cluster without faults; ``fetches``: whether its nodes fetch cached prefixes."""

    fetches = False

    def __init__(self) -> None:
        super().__init__()
        self.system: System
        self.is_faulty = False  # something happened that may fail a call

    @initialize(
        num_blocks=st.sampled_from([7, 9, 20]),
        mixed=st.booleans(),
        async_scheduling=st.booleans(),
        push_mode=st.sampled_from(PushMode),
        kv_digests=st.booleans(),
        max_receiving_requests=st.sampled_from([1, 64]),
        local_prefill_threshold=st.sampled_from([0, 6]),
        preemption=st.sampled_from(PREEMPTION),
        policy=st.sampled_from(POLICIES.names()),
        router_is_busy=st.booleans(),
        sometimes_alone=st.booleans(),
        rounds_per_step=st.sampled_from([1, 4]),
        chunk_s=st.sampled_from([0.0, 0.12]),
        index_is_small=st.booleans(),
        num_drafts=st.sampled_from([0, 3]),
        restarts_at_end=st.booleans(),
        scheduling_policy=st.sampled_from(SCHEDULING_POLICIES),
    )
    def make(
        self,
        mixed: bool,
        kv_digests: bool,
        max_receiving_requests: int,
        local_prefill_threshold: int,
        restarts_at_end: bool,
        scheduling_policy: str = SCHEDULING_POLICIES[0],
        **choices: Any,
    ) -> None:
        """Make the cluster; options not given are `Setup`'s defaults."""
        self.mixed, self.kv_digests = mixed, kv_digests
        self.restarts_at_end = restarts_at_end
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(secrets, "randbelow", lambda limit: limit // 2)
        self.patch.setattr(engine.worker.worker, "load_model", shared_model)
        self.patch.setattr(prefix_sources, "MIN_TOKENS", 1)  # prompts are short
        self.system = System(
            Setup(
                folder=folder(mixed=mixed),
                expected_kv=lambda prompt: reference_kv(tuple(prompt), mixed=mixed),
                num_groups=reference(mixed=mixed).engine.kv_memory.spec.num_groups,
                kv_digests=kv_digests,
                options=DecodeOptions(
                    max_receiving_requests=max_receiving_requests,
                    local_prefill_threshold=local_prefill_threshold,
                    max_step_stretch=0,  # how long steps take is not drawn
                ),
                contents={} if mixed else known_contents(),
                fetches=self.fetches,
                engine_options={"scheduling_policy": scheduling_policy},
                **choices,
            )
        )
        dead = self.system.dead
        self.patch.setattr(PeerProcess, "has_ended", lambda peer: node_of(peer.engine_id) in dead)

    def _call(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        timeout_s: float = LONG_S,
        salt: bytes = b"",
    ) -> Client:
        expected = expected_output(
            tuple(prompt), params, max_model_len=self.system.max_model_len, mixed=self.mixed
        )
        priority = len(self.system.clients) % 3 - 1
        return self.system.call(request_id, prompt, params, timeout_s, expected, salt, priority)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def it_is_sound(self) -> None:
        if hasattr(self, "system"):
            self.system.check()

    def teardown(self) -> None:
        if not hasattr(self, "system"):
            return
        try:
            self.drain()
        finally:
            self.system.abandon()
            self.patch.undo()

    def drain(self) -> None:
        system = self.system
        system.heal(restart=self.restarts_at_end)
        system.network.release()
        system.settle()
        system.check()
        system.check_clean()
        for client in system.clients:
            client.check_cached(system.clients)
            late = client.call.timeout_s < LONG_S and isinstance(
                client.error, DeadlineExceededError | OverloadedError
            )
            if not (self.is_faulty or client.left or late):
                assert client.error is None, f"nothing went wrong, and yet: {client.error!r}"
            if client.call.timeout_s == LONG_S:
                assert not isinstance(client.error, DeadlineExceededError), "it was left to wait"
        if all(not process.dead for process in system.processes.values()):
            assert num_pairs(system.pool) == 4, "not all are together again"
            params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
            last = self._call("last", prompt_of(1, 9), params)
            system.settle()
            assert last.error is None, "the next call fails"
            system.check_clean()
        system.close()
