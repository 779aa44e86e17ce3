"""Which blocks of a prompt are in each node's prefix cache, as far as nodes report it."""
