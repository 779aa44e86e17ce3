"""Tells nodes which peers join and leave."""
