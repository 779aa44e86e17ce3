"""The router's gate: decides which requests begin, wait or are refused. Knows no placement."""
