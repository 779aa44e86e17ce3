"""Speculation: who guesses the next tokens. One file and one line here for each; lazy imports."""

from baton.registry import Registry
from engine.speculation.base import Proposer

PROPOSERS: Registry[type[Proposer]] = Registry(
    "speculative method", {"ngram": "engine.speculation.ngram:NgramProposer"}
)
