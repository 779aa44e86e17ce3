"""Program 1: the public API; places requests on pairs of nodes and streams their tokens."""
