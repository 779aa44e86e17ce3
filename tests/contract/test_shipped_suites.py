"""The suites of `baton.testing`, which plug-ins' authors run, over Baton's own entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from baton.testing.attention import AttentionContract
from baton.testing.parsers import ParserContract
from baton.testing.policies import PolicyContract
from baton.testing.proposers import ProposerContract
from baton.testing.transports import TransportContract
from baton_kernels.attention import ATTENTION_BACKENDS
from baton_kernels.attention.base import AttentionBackend
from kvconnector import KV_CONNECTORS
from kvconnector.transports.base import MakeTransport
from router.intake.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from router.intake.parsers.base import OutputParser, ParserContext
from router.policies import POLICIES
from router.policies.base import RoutingPolicy
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = pytest.mark.medium


class OfEach:
    """Gives a suite the name of an entry."""

    name = ""

    @pytest.fixture(autouse=True)
    def _use(self, entry: str) -> None:
        self.name = entry


@pytest.mark.parametrize("entry", POLICIES.names())
class TestPolicies(OfEach, PolicyContract):
    num_drawn = 10

    def make(self) -> RoutingPolicy:
        return POLICIES.load(self.name)()


@pytest.mark.parametrize("entry", ["cpu", "native"])  # others: in their own tests
class TestAttention(OfEach, AttentionContract):
    def make(self) -> AttentionBackend:
        return ATTENTION_BACKENDS.load(self.name)()


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(name, marks=[pytest.mark.nixl] if name == "nixl" else [])
        for name in KV_CONNECTORS.names()
    ],
)
class TestTransports(OfEach, TransportContract):
    def make(self) -> MakeTransport:
        return KV_CONNECTORS.load(self.name)


@pytest.mark.parametrize("entry", TOOL_CALL_PARSERS.names())
class TestToolParsers(OfEach, ParserContract):
    outputs = ('ab<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>c',)
    num_cuts = 3

    def make(self) -> Callable[[ParserContext], OutputParser]:
        return TOOL_CALL_PARSERS.load(self.name)


@pytest.mark.parametrize("entry", ["qwen3", "seed_oss"])
class TestReasoningParsers(OfEach, ParserContract):
    outputs = ("<think>a thought</think>the answer", "<seed:think>a</seed:think>b")
    num_cuts = 3

    def make(self) -> Callable[[ParserContext], OutputParser]:
        return REASONING_PARSERS.load(self.name)


class TestNgrams(ProposerContract):
    method = "ngram"
    model = str(DEMO_MODEL)
    options: ClassVar = {"dtype": "float32", "num_threads": 1, "num_blocks": 64}
