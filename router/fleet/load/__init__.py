"""One node's load, speed and deadlines, as numbers for policies to compare."""
