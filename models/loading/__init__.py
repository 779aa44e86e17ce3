"""Load weights from files into modules."""
