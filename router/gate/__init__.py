"""The router's gate: decides which requests begin, wait or are refused; places no requests."""
