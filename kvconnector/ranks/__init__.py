"""Nodes of several ranks: each rank has a transport and memory; the leading rank commands all."""
