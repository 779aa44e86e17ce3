"""The commands of `baton admin` that change a fleet: nodes, names, adapters, revisions, weights."""
