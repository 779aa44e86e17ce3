"""How nodes learn of their peers."""
