"""Speculation: who guesses the next tokens. One file and one line here for each; lazy imports.

What has weights guesses where the model computes (`models/drafters`, `engine/worker/drafting`), and
here its guesses are taken from the steps' results.
"""

from baton.registry import Registry
from engine.speculation.base import Proposer

_IN_STEPS = "engine.speculation.in_steps:InStepsProposer"

PROPOSERS: Registry[type[Proposer]] = Registry(
    "speculative method",
    {
        "ngram": "engine.speculation.ngram:NgramProposer",
        "draft_model": _IN_STEPS,
        "medusa": _IN_STEPS,
        "eagle": _IN_STEPS,
        "mtp": _IN_STEPS,
    },
)
