"""Commands that run programs; the programs' dataclasses declare their options."""
