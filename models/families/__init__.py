"""Families of models: one file has all knowledge of a family; `registry.py` lists the names."""
