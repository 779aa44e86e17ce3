"""Work of a step beside its forward: encodings, pooled numbers, and tokens of other ranks."""
