"""Pins: prefixes that the prefix cache keeps for some time because a client comes back to them."""
