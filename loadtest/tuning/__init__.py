"""Searches options of nodes and the router with which a deployment keeps an SLO more often."""
