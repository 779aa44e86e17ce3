"""Divides chat outputs into reasoning, calls and answer, and writes grammars for outputs."""
