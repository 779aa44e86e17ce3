"""Commands of `baton admin` that change a running system: nodes, names, adapters and more."""
