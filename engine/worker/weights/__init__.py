"""New weights for a running worker: load them beside the old weights, then use or drop them."""
