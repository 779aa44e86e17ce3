"""Transfers that other nodes send to this node beside hand-offs: expected, granted and ended."""
