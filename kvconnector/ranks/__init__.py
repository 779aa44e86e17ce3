"""A node of several ranks: each owns a transport and its memory; one commands them all."""
