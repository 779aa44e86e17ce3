"""Families of which some layers carry a state from token to token, and others attend."""
