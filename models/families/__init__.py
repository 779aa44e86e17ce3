"""Families of models: one file holds all that is known of one; `registry.py` lists their names."""
