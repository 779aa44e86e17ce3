"""How much of a prompt each node has in its prefix cache, as far as nodes report their caches."""
