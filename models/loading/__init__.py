"""From files of weights to modules."""
