"""The router: serves the public APIs, places requests on pairs of nodes, streams their tokens."""
