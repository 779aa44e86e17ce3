"""Load tests: traces of requests, and (to come) who plays them. No torch."""
