"""Model families: one file has everything that is specific to a family.

`models/registry.py` lists the supported names."""
