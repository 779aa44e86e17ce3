"""How busy one node is, how fast, and what it has promised; numbers that others judge."""
