"""Changes the weights of a running node: between two steps of its engine, and between two joins."""
