"""The router: serves the public API, places requests on pairs of nodes, streams tokens."""
