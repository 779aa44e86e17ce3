"""One node's load, speed and deadlines. Only numbers, no judgements."""
