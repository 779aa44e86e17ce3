"""Connectors of nodes with several ranks: the leading rank commands the transports of all ranks."""
