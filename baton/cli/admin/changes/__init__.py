"""Commands that change a fleet: its nodes, names, adapters, revisions, weights and settings."""
