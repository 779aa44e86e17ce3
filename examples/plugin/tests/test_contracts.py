"""Baton's contract tests, which a plug-in's author runs on the entries of the plug-in.

The tests need ``BATON_PLUGINS=baton-sample-plugin``, so that Baton finds the plug-in's entries.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton import SamplingParams
from baton.testing.architectures import ArchitectureContract
from baton.testing.attention import AttentionContract
from baton.testing.parsers import ParserContract
from baton.testing.policies import PolicyContract
from baton.testing.proposers import ProposerContract
from baton.testing.transports import TransportContract
from baton_kernels.attention import ATTENTION_BACKENDS
from baton_kernels.attention.base import AttentionBackend
from engine import LLM
from kvconnector import KV_CONNECTORS
from kvconnector.transports.base import MakeTransport
from router.intake.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from router.intake.parsers.base import OutputParser, ParserContext
from router.policies import POLICIES
from router.policies.base import RoutingPolicy

MODEL = os.environ.get("SAMPLE_MODEL", "examples/demo_model")  # a small Qwen3


class TestPolicy(PolicyContract):
    def make(self) -> RoutingPolicy:
        return POLICIES.load("fewest_requests")()


class TestAttention(AttentionContract):
    def make(self) -> AttentionBackend:
        return ATTENTION_BACKENDS.load("sample")()


class TestTransport(TransportContract):
    def make(self) -> MakeTransport:
        return KV_CONNECTORS.load("sample")


class TestProposer(ProposerContract):
    method = "repeat"
    model = MODEL


class TestCalls(ParserContract):
    outputs = ('Wait. <sample_call>{"name": "f", "arguments": {"x": 1}}</sample_call>',)

    def make(self) -> Callable[[ParserContext], OutputParser]:
        return TOOL_CALL_PARSERS.load("sample_calls")


class TestThoughts(ParserContract):
    outputs = ("<musing>It may be 4.</musing>4",)

    def make(self) -> Callable[[ParserContext], OutputParser]:
        return REASONING_PARSERS.load("sample_thoughts")


class TestArchitecture(ArchitectureContract):
    @pytest.fixture(autouse=True)
    def _make_checkpoint(self, tmp_path: Path) -> None:
        """Copy the model, and name the plug-in's architecture in the copy's config.json."""
        for file in Path(MODEL).iterdir():
            if file.is_file():
                shutil.copy(file, tmp_path / file.name)
        config = json.loads((tmp_path / "config.json").read_text())
        config["architectures"] = ["SampleForCausalLM"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        self.model = str(tmp_path)

    def expected(self, prompt: Sequence[int], num_tokens: int) -> Sequence[int]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        return LLM(MODEL, dtype="float32").generate([list(prompt)], params)[0].token_ids
