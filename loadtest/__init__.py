"""Load tests: traces of requests, and who plays them against a server. No torch."""
