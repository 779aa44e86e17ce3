"""New weights for a running worker: load them beside the old ones, then use or drop them."""
