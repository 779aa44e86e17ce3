"""Decides which nodes are peers, tells nodes of them, and notes which pairs are connected."""
