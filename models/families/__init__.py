"""Families of models, one file each with all knowledge of it; `registry.py` lists their names."""
