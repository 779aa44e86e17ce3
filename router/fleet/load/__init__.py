"""How busy one node is, how fast, and what it has promised. Only numbers, no judgements."""
