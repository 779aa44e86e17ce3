"""Which nodes are peers, how nodes learn of their peers, and which pairs are connected."""
