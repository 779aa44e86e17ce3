"""Grammars of chat outputs, and the division of outputs into reasoning, calls and answer."""
