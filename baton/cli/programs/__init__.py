"""Commands that run programs; their options come from the programs' dataclasses."""
