"""Speculation: makes drafts, and decides how many to verify. To add a proposer, add a file and a
line here.

Drafters with weights run in the workers (`models/drafters`, `engine/worker/drafting`); their drafts
come with the results of steps. A proposer's module is imported only when it is used.
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
    plugin_group="baton.proposers",
)
