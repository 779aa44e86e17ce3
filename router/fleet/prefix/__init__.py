"""Which blocks of which prompts are in which node's prefix cache, as far as the router is told."""
