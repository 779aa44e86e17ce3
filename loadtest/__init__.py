"""Load tests: traces of requests, and players that send them to a server. No torch."""
