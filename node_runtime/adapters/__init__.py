"""Adapters of a node: commands that wait for theirs, and how operators load and pin them."""
