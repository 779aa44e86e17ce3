"""Other weights for a running worker: loaded beside the old ones, put in their place, let go."""
