"""The router's gate: which requests begin now, wait or are refused. Knows no placement."""
