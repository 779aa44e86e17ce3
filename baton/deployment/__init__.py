"""Starts a router and its nodes as processes of this machine, or where Ray places them."""
