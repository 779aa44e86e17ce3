"""Nodes of several ranks: each rank owns a transport and memory; the leading rank commands all."""
