"""Which node's prefix cache has which blocks of a prompt, as far as nodes report it."""
