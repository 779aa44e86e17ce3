"""Cached prefixes that nodes send to each other: the end that holds them, and the end that asks."""
