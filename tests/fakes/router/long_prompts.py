"""A node on which attention takes most of the time of long prompts, as its own clock shows it.

The values are those of a measured node: 0.15 s for 1,024 tokens, 12.6 s for 16,384.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from baton.link.words import NodeRegistration, NodeRole, StepTime
from router.fleet.load.node_load import NodeLoad, SharedRates
from tests.fakes.router.nodes import make_registration

CHUNK, SHARE = 512, 1 / 1295
LENGTHS = (1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class QuadraticNode:
    """Takes a fixed time per step, a time per token, and a time per pair of tokens."""

    base_s: float = 0.001
    token_s: float = 1.04e-4

    def step_s(self, num_tokens: int, num_context: int = 0) -> float:
        """Return the seconds of one step."""
        pairs = num_tokens * (num_context + num_tokens / 2)
        return self.base_s + self.token_s * (num_tokens + SHARE * pairs)

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds of a prompt that is computed in chunks."""
        num_base = math.ceil(num_tokens / CHUNK) - 1
        return self.step_s(num_tokens) + num_base * self.base_s if num_tokens else 0.0

    def registration(
        self, context: int = 4096, name: str = "p0", role: NodeRole = NodeRole.PREFILL
    ) -> NodeRegistration:
        """Return a registration with the node's profile."""
        return dataclasses.replace(
            make_registration(name, role, max_model_len=20_000),
            step_times=tuple(StepTime(num, self.step_s(num)) for num in (1, 64, CHUNK)),
            context_step_times=(StepTime(CHUNK, self.step_s(CHUNK, context), context),),
            num_chunk_tokens=CHUNK,
        )

    def load(self, shared: SharedRates | None = None) -> NodeLoad:
        return NodeLoad(self.registration(), shared, lambda: 0.0)
