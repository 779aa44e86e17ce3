"""Other weights for a running node: between two steps of its engine, and between two joins."""
