"""Chat outputs: their grammars, and their division into reasoning, calls and answer."""
