"""A node of several ranks: each owns a transport and its memory; the leading rank commands all."""
